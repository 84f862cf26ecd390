# SPDX-License-Identifier: Apache-2.0
"""Adapts transformers: `experts_implementation="sluice"` and `DistributedConfig(ep_implementation="sluice")`.

Users do not import this package: `hook.py` adds both names to transformers' registries when these are imported.
"""

NAME = "sluice"  # in both registries
