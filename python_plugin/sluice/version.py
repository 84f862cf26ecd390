# SPDX-License-Identifier: Apache-2.0
"""Defines the version of the package, for banners, files and comparisons between ranks."""

try:
    from sluice._version import __version__
except ImportError:  # in the source tree: only the packaging writes the version
    __version__ = "0+source"
