"""`python -m integration_tests.benchmarks.overlap` is tuner/overlap.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.tuner.overlap", run_name="__main__", alter_sys=True)
