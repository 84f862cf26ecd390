"""`python -m integration_tests.benchmarks.stages` is stages.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.stages.stages", run_name="__main__", alter_sys=True)
