"""`python -m integration_tests.benchmarks.layer` is layer.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.layer.layer", run_name="__main__", alter_sys=True)
