"""`python -m integration_tests.benchmarks.moves` is moves.py beside this."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.moves.moves", run_name="__main__", alter_sys=True)
