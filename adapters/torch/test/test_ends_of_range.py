# SPDX-License-Identifier: Apache-2.0
"""Compares every kernel with torch at the ends of its dtype's range: huge, subnormal, infinite and NaN values.

A new kernel needs a row here: KERNELS names each kernel of backend/device/kernels.h with the test that compares it, and
the last test compares both lists. If Sluice differs from torch, the test says why.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import sluice.optim
import torch
import torch.nn.functional as F
from sluice._library import load
from sluice.adapters.torch import MoeConfig, MoeLayer, Swiglu
from sluice.adapters.torch.descriptors import Descriptors
from sluice.adapters.torch.layer_config import ACTIVATIONS

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


def swiglu(x):
    gate = x.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate)


# By activation: torch's function of x, without a gate.
TORCH = {
    "identity": lambda x: x * 1,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": swiglu,
}
ACTIVATION, SUMS, COPIES = "Activation_AtTheEnds", "SumsOfRows_AtTheEnds", "copies what it is given"
EXPERTS = "of CUDA alone, with the bits of unit_forward and _backward: Experts_ManyAtOnce_AreOneByOne"
KERNELS = {
    "gather_rows": COPIES,
    "gather_rows_of_two": COPIES,
    "scatter_rows": COPIES,
    "move_rows": COPIES,
    "gather_scalars": COPIES,
    "spread_scalars": COPIES,
    "combine_rows": SUMS,
    "scale_rows": SUMS,
    "pack_matrices": "copies, rounded by the conversions that SumsOfRows compares",
    "scale_columns": "one product, rounded likewise",
    "dot_rows": SUMS,
    "unit_forward": ACTIVATION,
    "unit_backward": ACTIVATION,
    "experts_forward": EXPERTS,
    "experts_backward": EXPERTS,
    "add_bias": "one sum, rounded by the conversions that SumsOfRows compares",
    "sum_columns": "the same",
    "round_rows": "the same",
}


def ends(dtype):
    info = torch.finfo(dtype)
    sizes = [info.max, info.max / 2, 1e4, 200.0, 90.0, 20.0, 11.0, 5.0, 0.75, 1e-3, info.tiny, info.smallest_normal / 4]
    numbers = [0.0, -0.0, INF, -INF, NAN, *sizes, *(-size for size in sizes)]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def assert_close(mine, wide, dtype, what, is_nan=None, atol=1e-15):
    """Compares with torch's result for the same numbers in f64, rounded: torch's f32 kernels lose the tails of GELU,
    and return NaN for gelu(inf). Where is_nan is set, Sluice's result must be NaN too; elsewhere torch's NaN (inf * 0
    within a slope) may be a number."""
    other = wide.to(dtype)
    where = ~other.isnan()
    is_nan = ~where if is_nan is None else is_nan
    rtol = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    # f64 loses the tails below 1e-15; instructions for products of bf16 take subnormal numbers as 0.
    atol = max(torch.finfo(dtype).smallest_normal, atol)
    torch.testing.assert_close(
        mine[where], other[where], rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}\n{mine}\n{other}"
    )
    assert mine[is_nan].isnan().all(), f"{what}: no NaN\n{mine}\n{other}"


# ---- activations ------------------------------------------------------------------------------------------------


def through_layer(context, name, gated, dtype, x, slopes):
    """Runs rows of one element with matrices of 1, so that the layer is its activation, times x with a gate."""
    options = {"swiglu": Swiglu(1.702, 7.0, 0.0)} if name == "swiglu" else {}
    layer = MoeLayer(
        context,
        MoeConfig(
            model_width=1, hidden_width=1, num_experts=1, top_k=1, activation=name, gated=gated, dtype=dtype, **options
        ),
    )
    one = torch.ones(1, 1, dtype=dtype)
    params = [{"w1": one, "w2": one, **({"w3": one} if gated else {})}]
    tokens = x.clone().reshape(-1, 1).requires_grad_()
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    out = layer(tokens, ids, torch.ones(len(x), 1), params)
    out.backward(slopes.reshape(-1, 1))
    return out.detach().reshape(-1), tokens.grad.reshape(-1)


@by_dtype
@pytest.mark.parametrize("name", sorted(TORCH))
def test_Activation_AtTheEnds_IsTorchs(context, name, dtype):
    x = ends(dtype)
    for gated, slope in itertools.product((False, True), (1.0, 0.0, 1e-3)):
        if name == "swiglu" and not gated:
            continue
        slopes = torch.full_like(x, slope)
        mine = through_layer(context, name, gated, dtype, x, slopes)
        leaf = x.clone().requires_grad_()
        wide = leaf.double()
        wide.retain_grad()
        up = wide.clamp(-7.0, 7.0) if name == "swiglu" else wide
        out = TORCH[name](wide) * (up if gated else 1.0)
        out.backward(slopes.double())
        assert_close(mine[0], out.detach(), dtype, f"{name}, gated {gated}", x.isnan())
        # Of outputs that are numbers: what goes back from an infinite or NaN one may be NaN. Slopes have a zero.
        within = out.detach().to(dtype).isfinite() & ((x == 0) | (x.abs() >= torch.finfo(dtype).smallest_normal))
        what = f"gradient of {name}, gated {gated}, slope {slope}"
        assert_close(mine[1][within], wide.grad[within], dtype, what, atol=1e-7)


# ---- sums of rows -----------------------------------------------------------------------------------------------

WEIGHTS = [0.0, 1.0, -0.0, 1e-40, 3e38, INF, -INF, NAN]


@by_dtype
@pytest.mark.parametrize("restore", ["keep", "offload", "redispatch"])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_SumsOfRows_AtTheEnds_AreTorchs(context, dtype, restore, deduplicate):
    """A weight of 0 times an infinite output is NaN, as in torch; only a route that is dropped (-1) adds nothing."""
    rows = ends(dtype)
    rows = rows[(rows == 0) | ~(rows.abs() < torch.finfo(dtype).smallest_normal)]  # products of bf16 have none
    pairs = list(itertools.product(range(len(rows)), WEIGHTS))
    x = torch.stack([rows[index] for index, _ in pairs]).reshape(-1, 1)
    weights = torch.tensor([[0.5, weight] for _, weight in pairs])
    layer = MoeLayer(
        context,
        MoeConfig(
            model_width=1,
            hidden_width=1,
            num_experts=2,
            top_k=2,
            activation="identity",
            dtype=dtype,
            deduplicate=deduplicate,
            policy=(restore, "adaptive"),
        ),
    )
    one = torch.ones(1, 1, dtype=dtype)
    params = [{"w1": one, "w2": one} for _ in range(2)]
    for dropped in (False, True):
        ids = torch.tensor([[0, -1 if dropped else 1]] * len(pairs), dtype=torch.int32)
        tokens, mine = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = layer(tokens, ids, mine, params)
        out.backward(torch.ones_like(out))
        leaf, theirs = x.clone().requires_grad_(), weights.double().requires_grad_()
        wide = leaf.double()
        other = wide * theirs[:, :1] + (0.0 if dropped else wide * theirs[:, 1:])
        other.backward(torch.ones_like(other))
        what = f"restore {restore}, deduplicated {deduplicate}, dropped {dropped}"
        assert_close(out.detach(), other.detach(), dtype, what)
        assert_close(mine.grad, theirs.grad, torch.float32, f"gradient of weights, {what}")


# ---- the optimizer ----------------------------------------------------------------------------------------------


def stepped(kind, values, grads, options):
    param = torch.nn.Parameter(values.clone())
    optimizer = kind([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


OPTIONS = [{}, {"weight_decay": 0.0}, {"eps": 0.0}, {"betas": (0.0, 0.0)}, {"lr": 0.0}, {"maximize": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@by_dtype
def test_Adam_AtTheEnds_IsTorchs(name, dtype, options):
    """Compares steps in f32, since moments of 16-bit parameters are f32 here. Torch takes the same step in f32."""
    pairs = torch.cartesian_prod(ends(dtype).float(), ends(dtype).float())
    values, first = pairs[:, 0].to(dtype), pairs[:, 1].to(dtype)
    grads = [first, torch.ones_like(first), torch.zeros_like(first)]
    mine = stepped(getattr(sluice.optim, name), values, grads, {**options, "check_finite": False})
    wide = stepped(
        getattr(torch.optim, name), values.float(), [grad.float() for grad in grads], {**options, "foreach": False}
    )
    if dtype is torch.float32:
        # torch's difference of grad and exp_avg, and its product lr * exp_avg, leave the range sooner than Sluice's.
        narrow = values.abs().lt(1e30) | ~values.isfinite()
        usual = narrow & (first.abs().lt(1e38) | ~first.isfinite())
        for a, b, what in zip(mine, wide, ("p", "m", "v"), strict=True):
            # An infinite gradient leaves NaN in m and p on both sides, and in v on one of them.
            where = usual & first.isfinite() & ~b.isnan() if what == "v" else usual & ~b.isnan()
            atol = 1e-9 if what == "p" else 1e-37  # a v below 1e-30 has few bits: lr * 1e-6
            torch.testing.assert_close(
                a[where], b[where], rtol=1e-5, atol=atol, msg=lambda text, at=what: f"{at}: {text}"
            )
        assert mine[0][values.isnan() | first.isnan()].isnan().all()
    finite = wide[0].to(dtype).isfinite()
    assert mine[0][finite].isfinite().all(), "torch's parameter is finite and Sluice's is not"


def test_Norm_AboveF32_ClipsWhereTorchsIsInfinite():
    """torch sums squares in f32: its norm of 1e25 is infinite, and every gradient 0. Sluice sums in f64."""
    values, grad = torch.zeros(4), torch.full((4,), 1e25)
    param = torch.nn.Parameter(values.clone())
    optimizer = sluice.optim.AdamW([param], max_norm=1.0, betas=(0.0, 0.999))
    param.grad = grad
    optimizer.step()
    assert optimizer.norm == pytest.approx(2e25)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.full((4,), 0.5))
    with pytest.warns(UserWarning):
        for bad in (INF, NAN):
            param.grad = torch.tensor([bad, 1.0, 1.0, 1.0])
            optimizer.step()
    assert optimizer.skipped_steps == 2 and param.isfinite().all()


# ---- the gate ---------------------------------------------------------------------------------------------------

LOGITS = [
    [0.0, 0.0, 0.0, 0.0],
    [3e38, -3e38, 1.0, 0.0],
    [3e38, 3e38, 3e38, 3e38],
    [-3e38, -3e38, -3e38, -3e38],
    [1e-40, 2e-40, 0.0, -1e-40],
    [88.0, 89.0, -88.0, 0.0],
    [-INF, 0.0, 1.0, -INF],
    [INF, 0.0, 1.0, 2.0],
    [NAN, 0.0, 1.0, 2.0],
    [-INF, -INF, -INF, -INF],
]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_Gate_AtTheEnds_IsTorchs(score):
    lib, ffi = load().lib, load().ffi
    logits, top_k = torch.tensor(LOGITS), 4
    config = ffi.new("sluice_gate_config_t *")
    lib.sluice_gate_config_init(config, ffi.sizeof("sluice_gate_config_t"))
    config.num_experts, config.top_k = logits.shape[1], top_k
    config.score = {"softmax": 0, "sigmoid": 1}[score]
    ids = torch.empty(len(logits), top_k, dtype=torch.int32)
    weights = torch.empty(len(logits), top_k)
    place = Descriptors(3)
    at = [place.fill(i, tensor, "gate") for i, tensor in enumerate((logits, ids, weights))]
    null = ffi.NULL
    assert lib.sluice_gate_forward(config, at[0], null, at[1], at[2], null, null, null) == 0
    assert all(sorted(row) == list(range(top_k)) for row in ids.tolist())  # always valid experts
    scores = torch.empty_like(weights).scatter_(1, ids.long(), weights)
    theirs = logits.double().softmax(1) if score == "softmax" else logits.double().sigmoid()
    assert_close(scores, theirs, torch.float32, score)


def test_Table_HasEveryKernel():
    assert set(TORCH) == set(ACTIVATIONS)
    header = Path(__file__).resolve().parents[3] / "backend" / "device" / "kernels.h"
    assert set(KERNELS) == set(re.findall(r"void \(\*(\w+)\)\(", header.read_text()))
