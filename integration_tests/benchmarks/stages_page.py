"""`python -m integration_tests.benchmarks.stages_page` is stages/stages_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.stages.stages_page", run_name="__main__", alter_sys=True)
