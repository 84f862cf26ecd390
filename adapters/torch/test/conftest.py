# SPDX-License-Identifier: Apache-2.0
"""The folder above has an `__init__.py` and is called `torch`: pytest would import it under that name."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for node in item.listchain():
        if isinstance(node, pytest.Package):
            node.setup = lambda: None
