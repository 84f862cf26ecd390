# SPDX-License-Identifier: Apache-2.0
"""Runs the batches of DeepSpeed's pipeline engine, and moves layers between its stages."""
