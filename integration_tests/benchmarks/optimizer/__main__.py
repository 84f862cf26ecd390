"""`python -m integration_tests.benchmarks.optimizer` is optimizer.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.optimizer.optimizer", run_name="__main__", alter_sys=True)
