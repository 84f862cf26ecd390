"""`python -m integration_tests.benchmarks.experts` is experts.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.experts.experts", run_name="__main__", alter_sys=True)
