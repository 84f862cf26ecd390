"""`python -m integration_tests.benchmarks.ep` is ep.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.ep.ep", run_name="__main__", alter_sys=True)
