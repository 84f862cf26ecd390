"""`python -m integration_tests.benchmarks.records_page` is measuring/records_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.measuring.records_page", run_name="__main__", alter_sys=True)
