"""`python -m integration_tests.benchmarks.drawn_page` is drawn/drawn_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.drawn.drawn_page", run_name="__main__", alter_sys=True)
