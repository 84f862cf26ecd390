# SPDX-License-Identifier: Apache-2.0
"""The optimizers of DeepSpeed: the ops of its Adams, and readers of what an optimizer keeps of a parameter."""
