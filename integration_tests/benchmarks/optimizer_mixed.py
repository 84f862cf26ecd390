"""`python -m integration_tests.benchmarks.optimizer_mixed` is optimizer/optimizer_mixed.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.optimizer.optimizer_mixed", run_name="__main__", alter_sys=True)
