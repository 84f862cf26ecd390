"""`python -m integration_tests.benchmarks.scenarios_page` is scenarios/scenarios_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.scenarios.scenarios_page", run_name="__main__", alter_sys=True)
