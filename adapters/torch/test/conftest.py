# SPDX-License-Identifier: Apache-2.0
"""Keeps pytest from importing the parent folder, which has an `__init__.py`, as a package named `torch`; and provides a
context."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for node in item.listchain():
        if isinstance(node, pytest.Package):
            node.setup = lambda: None


@pytest.fixture
def context():
    from sluice.adapters.torch import Context, ContextOptions

    made = Context(None, ContextOptions(gemm="native"))
    yield made
    made.close()
