# SPDX-License-Identifier: Apache-2.0
"""`python -m integration_tests.benchmarks CASE [options]`; without CASE it lists the cases (measuring/bench.py)."""

import sys

from integration_tests.benchmarks.measuring.bench import main

sys.exit(main(sys.argv[1:]))
