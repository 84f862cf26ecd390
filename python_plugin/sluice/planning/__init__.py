# SPDX-License-Identifier: Apache-2.0
"""Modules of `sluice plan` and `sluice simulate`: machines, layers, and the planner of the C library."""
