# SPDX-License-Identifier: Apache-2.0
"""Analyses the recordings of ranks for `sluice trace`: passes and their schedules, one clock, idle time explained."""
