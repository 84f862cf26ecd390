"""`python -m integration_tests.benchmarks.live` is live.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.live.live", run_name="__main__", alter_sys=True)
