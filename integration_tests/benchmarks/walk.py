"""`python -m integration_tests.benchmarks.walk` is overhead/walk.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.overhead.walk", run_name="__main__", alter_sys=True)
