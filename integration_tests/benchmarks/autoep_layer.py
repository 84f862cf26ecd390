"""`python -m integration_tests.benchmarks.autoep_layer` is hosts/autoep_layer.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.hosts.autoep_layer", run_name="__main__", alter_sys=True)
