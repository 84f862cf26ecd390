# SPDX-License-Identifier: Apache-2.0
"""Moves experts between ranks, at once or while training continues. This package imports no host."""
