# SPDX-License-Identifier: Apache-2.0
"""Sluice in Megatron-Core: `MoELayer` runs its dispatch, experts and combine in C.

Users name `sluice.megatron`: `--spec sluice.megatron moe_block_spec`, or `with_sluice(spec)` around a spec.
"""
