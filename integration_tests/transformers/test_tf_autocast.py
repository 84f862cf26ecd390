# SPDX-License-Identifier: Apache-2.0
"""Tests autocast: the same tensors are cast as in transformers' eager loop, and uncast ones are not read.

GPT-OSS gets f32 inside, because its loop adds f32 biases (test_tf_precision.py): nothing is cast.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tf_compare
import tf_families
import torch
from tf_compare import rows

MODEL, HIDDEN, EXPERTS = 37, 29, 64
KINDS = ("mixtral", "gpt_oss", "nemotron_h")


def make(kind: str) -> torch.nn.Module:
    return tf_families.make(kind, MODEL, HIDDEN, EXPERTS)


def cast_bytes(call: Callable[[], Any]) -> int:
    """Returns the bytes in f32 that a call casts to 16 bits."""
    casts: list[int] = []

    def see(function: Any, args: Any, out: Any) -> None:
        if function is torch.ops.aten._to_copy.default:
            source, into = args[0], out
        elif function is torch.ops.aten.copy_.default:
            into, source = args[:2]
        else:
            return
        if source.dtype == torch.float32 and into.dtype == torch.bfloat16:
            casts.append(source.nbytes)

    with tf_compare.Watch(see):
        call()
    return sum(casts)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("tokens", [0, 1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_Forward_OfFewTokens_CastsWhatEagerCasts(kind: str, tokens: int, grad: bool) -> None:
    module, given, cast = make(kind), rows(MODEL, EXPERTS, tokens, 2), {}
    for name in ("sluice", "eager"):
        with (
            tf_compare.implementation(module, name),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            module(given.tokens, given.ids, given.weights)
            cast[name] = cast_bytes(lambda: module(given.tokens, given.ids, given.weights))
    # Biases, which eager adds in f32, are a hundredth of the output.
    assert cast["sluice"] <= 1.05 * cast["eager"], cast
    assert cast["eager"] < 0.3 * sum(parameter.nbytes for parameter in module.parameters())
    assert (cast["sluice"] > 0) == (tokens > 0 and kind != "gpt_oss")


@pytest.fixture
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert bool(torch.empty_like(torch.ones(3), dtype=torch.bfloat16).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fresh_memory_is_nan", "one_gemm")
@pytest.mark.parametrize("tokens", [0, 1, 8, 300])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in KINDS), ("mixtral", torch.float16)],
    ids=str,
)
def test_Training_OfFewTokens_BitsOfAModelInThatDtype(kind: str, tokens: int, dtype: torch.dtype) -> None:
    """Compares outputs and all gradients, with repeated and dropped ids; with 300 tokens every expert has rows."""
    module, given = make(kind), rows(MODEL, EXPERTS, tokens, 3, hot=True)
    given.ids[::3, 1], given.weights[::3, 1] = EXPERTS, 0.0
    inside = torch.float32 if kind == "gpt_oss" else dtype
    wanted = tf_compare.run(copy.deepcopy(module).to(inside), given, inside)
    with torch.autocast("cpu", dtype=dtype):
        found = tf_compare.run(module, given, torch.float32)
        with torch.no_grad():
            again = module(given.tokens.to(inside), given.ids, given.weights)
    assert torch.equal(again, wanted["output"])
    for name, value in wanted.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value.float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_Training_OfCalledExperts_AsEagerUnderAutocast(dtype: torch.dtype) -> None:
    module, given = make("muse_spark"), rows(MODEL, EXPERTS, 40, 2)
    with torch.autocast("cpu", dtype=dtype):
        found = tf_compare.run(module, given, torch.float32)
        with tf_compare.implementation(module, "eager"):
            stock = tf_compare.run(module, given, torch.float32)
    wanted = tf_compare.reference(module, given, torch.float32)
    theirs = tf_compare.gaps(stock, wanted)
    for name, gap in tf_compare.gaps(found, wanted).items():
        assert found[name].dtype == stock[name].dtype == torch.float32, name
        assert gap <= max(2 * theirs[name], 1e-2), (name, gap)
