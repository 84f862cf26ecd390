# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core's `MoELayer` on Sluice: dispatch, experts and combine are computed in C.

Users import from `sluice.megatron`: `--spec sluice.megatron moe_block_spec`, or `with_sluice(spec)` around a spec.
"""
