"""`python -m integration_tests.benchmarks.papers` is papers.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.papers.papers", run_name="__main__", alter_sys=True)
