# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim` with torch's own table of optimizers: every option trains as torch's class does or is refused by
name, and errors have the text of torch's class."""

import sys
import types
import unittest

import pytest
import sluice.optim
import torch
from sluice.errors import InvalidArgument

pytestmark = pytest.mark.full  # torch's table imports much of its test code

NAMES = ("Adam", "AdamW")
REFUSED = ("amsgrad", "capturable", "differentiable")
DEVICES = ("cpu", "cuda", "mps")  # whose options are queried; parameters are on the CPU
STEPS = 20


@pytest.fixture(scope="module")
def table():
    """Returns torch's table by name. Its module imports a base class for test cases, which the table does not need."""
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "expecttest", sys.modules.get("expecttest", stand_in))
        from torch.testing._internal.common_optimizers import optim_db
    return {info.name: info for info in optim_db}


def _params():
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((10, 5), (10,), (1,))]


def _trained(kind, options):
    params = _params()
    optimizer = kind(params, **options)
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return params


@pytest.mark.parametrize("name", NAMES)
def test_EveryOptionOfTorchsTable_TrainsAsTorchsOrIsRefusedByName(table, name):
    trained = 0
    for each in (each for device in DEVICES for each in table[name].optim_inputs_func(device)):
        asked = [flag for flag in REFUSED if each.kwargs.get(flag)]
        if asked:
            with pytest.raises(InvalidArgument, match="|".join(asked)):
                getattr(sluice.optim, name)(_params(), **each.kwargs)
            continue
        mine = _trained(getattr(sluice.optim, name), each.kwargs)
        for a, b in zip(mine, _trained(getattr(torch.optim, name), each.kwargs), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7, msg=lambda text, at=each.desc: f"{at}: {text}")
        trained += 1
    assert trained >= 4


@pytest.mark.parametrize("name", NAMES)
def test_EveryErrorOfTorchsTable_HasTorchsWords(table, name):
    errors = table[name].optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) > 8
    for each in errors:
        given = each.optimizer_error_input
        params = _params() if given.params is None else given.params
        is_warning = issubclass(each.error_type, Warning)
        with (pytest.warns if is_warning else pytest.raises)(each.error_type, match=each.error_regex):
            getattr(sluice.optim, name)(params, **given.kwargs)
