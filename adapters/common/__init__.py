# SPDX-License-Identifier: Apache-2.0
"""Contains code that adapters of several hosts share, built on `sluice.adapters.torch`. It imports no host."""
