"""`python -m integration_tests.benchmarks.routing_cost` is overhead/routing_cost.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.overhead.routing_cost", run_name="__main__", alter_sys=True)
