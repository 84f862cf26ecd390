# SPDX-License-Identifier: Apache-2.0
"""Recognises and swaps DeepSpeed's MoE layers, native ones and those of AutoEP, and moves experts between ranks."""
