# SPDX-License-Identifier: Apache-2.0
"""Refusals of the planning tools."""

from sluice.errors import InvalidArgument


class BadInput(InvalidArgument):
    """A file or an option cannot be used: the message names the field, what was found and what to do."""
