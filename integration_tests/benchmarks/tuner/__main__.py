"""`python -m integration_tests.benchmarks.tuner` is tuner.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.tuner.tuner", run_name="__main__", alter_sys=True)
