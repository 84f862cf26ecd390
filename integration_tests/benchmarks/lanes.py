"""`python -m integration_tests.benchmarks.lanes` is grouping/lanes.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.grouping.lanes", run_name="__main__", alter_sys=True)
