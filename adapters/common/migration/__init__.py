# SPDX-License-Identifier: Apache-2.0
"""Experts that change ranks, at once or while training goes on. Nothing here knows a host."""
