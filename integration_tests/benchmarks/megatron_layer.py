"""`python -m integration_tests.benchmarks.megatron_layer` is hosts/megatron_layer.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.hosts.megatron_layer", run_name="__main__", alter_sys=True)
