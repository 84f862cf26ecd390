"""`python -m integration_tests.benchmarks.optimizer_page` is optimizer/optimizer_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.optimizer.optimizer_page", run_name="__main__", alter_sys=True)
