"""`python -m integration_tests.benchmarks.two_levels` is ep/two_levels.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.ep.two_levels", run_name="__main__", alter_sys=True)
