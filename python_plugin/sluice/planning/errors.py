# SPDX-License-Identifier: Apache-2.0
"""Defines the exception of the planning tools."""

from sluice.errors import InvalidArgument


class BadInput(InvalidArgument):
    """A file or an option cannot be used. The message names the field, what was found and what to do."""
