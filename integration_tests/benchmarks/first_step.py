"""`python -m integration_tests.benchmarks.first_step` is experts/first_step.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.experts.first_step", run_name="__main__", alter_sys=True)
