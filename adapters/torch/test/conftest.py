# SPDX-License-Identifier: Apache-2.0
"""Keeps pytest from importing the parent folder, which has an `__init__.py`, as a package named `torch`."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for node in item.listchain():
        if isinstance(node, pytest.Package):
            node.setup = lambda: None
