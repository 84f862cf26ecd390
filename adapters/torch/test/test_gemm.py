# SPDX-License-Identifier: Apache-2.0
"""Tests torch's GEMMs through the library's callback by themselves."""

import itertools

import pytest
import torch
from sluice._sluice_abi import ffi
from sluice.adapters.torch._native import native

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def gemm():
    return ffi.cast("sluice_host_gemm_fn_t", native().gemm_address)


def matrix(rows, columns, dtype, column_major, padding):
    """Values that are exact in any order of summation, in a wider allocation."""
    shape = (columns, rows + padding) if column_major else (rows, columns + padding)
    whole = torch.randint(-3, 4, shape).to(dtype)
    return whole[:, :rows].t() if column_major else whole[:, :columns]


def call(a, b, c, beta, dtype_c=None):
    args = ffi.new("sluice_host_gemm_args_t *")
    args.m, args.k = a.shape
    args.n = b.shape[1]
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        setattr(args, name, ffi.cast("void *", tensor.data_ptr()))
        setattr(args, f"{name}_row_stride", tensor.stride(0))
        setattr(args, f"{name}_col_stride", tensor.stride(1))
    args.dtype_ab = DTYPES[a.dtype]
    args.dtype_c = dtype_c or DTYPES[c.dtype]
    args.beta = beta
    return gemm()(ffi.NULL, args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_HostGemm_AllLayouts_MatchAndIgnoreNaN(dtype):
    torch.manual_seed(0)
    for columns in itertools.product((False, True), repeat=3):
        for m, n, k in ((5, 7, 9), (1, 4, 3), (6, 1, 1), (33, 16, 70)):
            a, b = matrix(m, k, dtype, columns[0], 2), matrix(k, n, dtype, columns[1], 0)
            want = a.float() @ b.float()
            c = matrix(m, n, dtype, columns[2], 3)
            old = c.clone()
            c.fill_(float("nan"))
            assert call(a, b, c, 0.0) == 0
            assert torch.equal(c.float(), want)
            c.copy_(old)
            assert call(a, b, c, 1.0) == 0
            assert torch.equal(c.float(), want + old.float())


def test_HostGemm_NothingToSum_ClearsOrKeeps():
    a, b, c = torch.empty(3, 0), torch.empty(0, 4), torch.full((3, 4), float("nan"))
    assert call(a, b, c, 0.0) == 0 and torch.equal(c, torch.zeros(3, 4))
    c.fill_(2)
    assert call(a, b, c, 1.0) == 0 and torch.equal(c, torch.full((3, 4), 2.0))


def test_HostGemm_WiderResult_IsDeclined():
    a, b, c = torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16(), torch.ones(2, 2)
    assert call(a, b, c, 0.0) != 0


def test_HostGemm_UnderAutocastAndModes_IsUntouched():
    from torch.utils.flop_counter import FlopCounterMode

    a, b, c = torch.full((2, 2), 1.0009765625), torch.eye(2), torch.zeros(2, 2)
    a.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), FlopCounterMode(display=False) as counter:
        assert call(a, b, c, 0.0) == 0
    assert torch.equal(c, a.detach())  # bf16 would have rounded
    assert counter.get_total_flops() == 0
