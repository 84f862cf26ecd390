"""`python -m integration_tests.benchmarks.blocks` is blocks.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.blocks.blocks", run_name="__main__", alter_sys=True)
