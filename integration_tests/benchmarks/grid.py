"""`python -m integration_tests.benchmarks.grid` is layer/grid.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.layer.grid", run_name="__main__", alter_sys=True)
