# SPDX-License-Identifier: Apache-2.0
"""A pipeline engine of DeepSpeed: its batches, its stages, and layers that change their stage."""
