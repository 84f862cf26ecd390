"""`python -m integration_tests.benchmarks.drawn` is drawn.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.drawn.drawn", run_name="__main__", alter_sys=True)
