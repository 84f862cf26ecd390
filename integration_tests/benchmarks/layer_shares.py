"""`python -m integration_tests.benchmarks.layer_shares` is layer/layer_shares.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.layer.layer_shares", run_name="__main__", alter_sys=True)
