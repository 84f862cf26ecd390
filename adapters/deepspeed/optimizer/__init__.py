# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizers: the ops of its Adams, and readers of an optimizer's states of a parameter."""
