"""`python -m integration_tests.benchmarks.train` is train.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.train.train", run_name="__main__", alter_sys=True)
