# SPDX-License-Identifier: Apache-2.0
"""What `sluice plan` and `sluice simulate` stand on: machines, layers, and the planner of the C library."""
