"""`python -m integration_tests.benchmarks.restore` is restore.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.restore.restore", run_name="__main__", alter_sys=True)
