"""`python -m integration_tests.benchmarks.grouping` is grouping.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.grouping.grouping", run_name="__main__", alter_sys=True)
