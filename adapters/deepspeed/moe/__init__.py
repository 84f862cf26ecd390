# SPDX-License-Identifier: Apache-2.0
"""The MoE layers of DeepSpeed, its own and those of AutoEP: recognised, swapped, and moved between ranks."""
