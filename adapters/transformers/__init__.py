# SPDX-License-Identifier: Apache-2.0
"""Sluice in transformers: `experts_implementation="sluice"` and `DistributedConfig(ep_implementation="sluice")`.

Nobody imports this package by hand: `hook.py` puts both names into transformers' registries when they are imported.
"""

NAME = "sluice"  # in both registries
