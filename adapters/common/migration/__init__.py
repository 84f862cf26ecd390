# SPDX-License-Identifier: Apache-2.0
"""Moves experts between ranks, at once or while training goes on. This package imports no host."""
