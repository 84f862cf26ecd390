# SPDX-License-Identifier: Apache-2.0
"""Supports DeepSpeed's optimizers: computes the ops of its Adams, and reads an optimizer's states by parameter."""
