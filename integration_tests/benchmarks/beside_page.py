"""`python -m integration_tests.benchmarks.beside_page` is hosts/beside_page.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("integration_tests.benchmarks.hosts.beside_page", run_name="__main__", alter_sys=True)
