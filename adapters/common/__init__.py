# SPDX-License-Identifier: Apache-2.0
"""What adapters of several hosts are built on, above `sluice.adapters.torch`; nothing here knows a host."""
