"""`python -m integration_tests.benchmarks.optimizer_overlap` is optimizer/optimizer_overlap.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.optimizer.optimizer_overlap", run_name="__main__", alter_sys=True)
