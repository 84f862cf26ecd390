"""`python -m integration_tests.benchmarks.overhead` is overhead.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.overhead.overhead", run_name="__main__", alter_sys=True)
