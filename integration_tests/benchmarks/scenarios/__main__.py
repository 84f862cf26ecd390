"""`python -m integration_tests.benchmarks.scenarios` is scenarios.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.scenarios.scenarios", run_name="__main__", alter_sys=True)
