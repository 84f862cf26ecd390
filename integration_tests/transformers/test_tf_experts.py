# SPDX-License-Identifier: Apache-2.0
"""Compares `experts_implementation="sluice"` with transformers' eager loop in f64: families, sizes, dtypes."""

import itertools
from typing import Any

import pytest
import sluice.errors
import tf_compare
import tf_families
import torch
from sluice.adapters.transformers import experts as experts_module
from tf_compare import check, rows
from torch.utils.checkpoint import checkpoint

MODEL, HIDDEN = 37, 29  # no multiple of 16 bytes in any dtype

# One class of each kind. The other classes are copies of these; all of them run with --full.
EVERYDAY = {
    "mixtral": "sluice",
    "qwen3_moe": "sluice",
    "deepseek_v3": "sluice",
    "gemma4": "sluice",
    "aria": "sluice",
    "beam": "sluice",
    "gpt_oss": "sluice",
    "openai_privacy_filter": "sluice",
    "nemotron_h": "sluice",
    "minimax_m3_vl": "sluice",
    "deepseek_v4": "sluice",
    "inkling2": "the module's own functions",
    "muse_spark": "the module's own functions",
}

# The classes of the registry whose own functions are called, and why; all others are fused.
CALLED = {
    "Inkling2Experts": "its gate is not one that",
    "Inkling2LoopExperts": "its gate is not one that",  # from 5.24
    "MuseSparkExperts": "it normalises each expert's output",
}


def make(kind: str = "mixtral", experts: int = 6, model: int = MODEL, hidden: int = HIDDEN) -> torch.nn.Module:
    return tf_families.make(kind, model, hidden, experts)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*itertools.product(EVERYDAY, (torch.float32, torch.bfloat16)), ("mixtral", torch.float16)],
    ids=str,
)
def test_Family_EachContract_AsEager(kind: str, dtype: torch.dtype) -> None:
    module = make(kind)
    check(module, rows(MODEL, 6, 23, 2), dtype)
    assert sluice.stats(module)["layers"][0]["computed_by"] == EVERYDAY[kind]


def test_Policy_OfTheModulesOwnFunctions_RunsThemAgainOrIsRefusedByName(capfd: pytest.CaptureFixture[str]) -> None:
    given = rows(MODEL, 6, 23, 2)
    found = []
    for policy in ("none", "S3", "S4"):
        sluice.configure(chunks=3, chunking="tokens", policy=policy)
        found.append(tf_compare.run(make("inkling2"), given, torch.float32))
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())
    sluice.configure(policy="S1")
    module = make("inkling2")
    for _ in range(2):  # a call that failed is repeated, as in a notebook whose cell runs twice
        with pytest.raises(sluice.errors.Unsupported, match="policy S1 is not possible with experts that run as"):
            tf_compare.run(module, given, torch.float32)
    sluice.configure(chunks=2, policy={"pre_activation": ["keep", "recompute"]})
    with pytest.raises(sluice.errors.Unsupported, match="they are recomputed in every chunk or in none"):
        tf_compare.run(make("inkling2"), given, torch.float32)
    sluice.configure(policy="S2", on_unsupported="warn")
    experts_module._announced.clear()
    check(make("inkling2"), given, torch.float32)
    assert "policy S2, here none: its rows and graphs are kept" in capfd.readouterr().out


def test_Policy_ByChunk_AsEager() -> None:
    given = rows(MODEL, 6, 23, 2)
    sluice.configure(chunks=3, policy={"input": ["redispatch", "keep", "offload"], "pre_activation": "recompute"})
    module = make("mixtral")
    check(module, given, torch.float32)
    assert sluice.stats(module)["contexts"][0]["last_num_chunks"] == 3


def test_Families_OfTheRegistry_AreAllFound() -> None:
    """The next test uses the classes of the installed transformers: if none is found, none is tested."""
    found = tf_families.classes()
    assert (len({kind for kind, _ in found}), len(found)) == (64, 65), "another release: look at what is new in it"


@pytest.mark.parametrize(("kind", "name"), tf_families.classes())
def test_Family_EveryClass_IsFusedOrCalledAndSaysWhy(kind: str, name: str) -> None:
    """No class is rejected. The next test compares the results with eager."""
    module = tf_families.make(kind, 16, 8, 4, name)
    with torch.no_grad():
        module(torch.randn(3, 16), torch.tensor([[0, 3], [1, 2], [3, 0]]), torch.ones(3, 2))
    (told,) = sluice.stats(module)["layers"]
    assert told["computed_by"] == ("the module's own functions" if name in CALLED else "sluice"), told
    assert told["why_not_fused"].startswith(CALLED[name]) if name in CALLED else told["why_not_fused"] == "", told


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), tf_families.classes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_Family_EveryClass_AsEager(kind: str, name: str, dtype: torch.dtype) -> None:
    module = tf_families.make(kind, MODEL, HIDDEN, 5, name)
    for tokens, top_k in ((0, 2), (1 if dtype == torch.float32 else 5, 1), (40, 3)):
        check(module, rows(MODEL, 5, tokens, top_k, hot=True), dtype)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "model", "hidden"),
    [
        *((tokens, top_k, 16, MODEL, HIDDEN) for tokens in (0, 1, 2, 7, 64, 256, 1024) for top_k in (1, 8)),
        *((50, 3, *sizes) for sizes in ((4, 1, 1), (64, 3, 5), (33, 128, 65), (8, 64, 256))),
    ],
)
def test_Sizes_OfRowsAndExperts_AsEager(tokens: int, top_k: int, experts: int, model: int, hidden: int) -> None:
    check(make(experts=experts, model=model, hidden=hidden), rows(model, experts, tokens, top_k))


@pytest.mark.parametrize("kind", ["mixtral", "muse_spark"])
def test_Routes_HotAndRepeatedExpert_AsEager(kind: str) -> None:
    check(make(kind), rows(MODEL, 6, 60, 4, hot=True))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "muse_spark"])
def test_Routes_Sentinel_AddsNothing(kind: str) -> None:
    given = rows(MODEL, 6, 30, 3)
    given.ids[::2, 1] = 6
    given.weights[::2, 1] = 0.0
    given.ids[4] = 6  # no route of this token is local
    given.weights[4] = 0.0
    check(make(kind), given)
    given.ids[:] = 6
    given.weights[:] = 0.0
    check(make(kind), given)


@pytest.mark.parametrize("options", [{}, {"chunks": 8, "chunking": "tokens", "wgrad_mode": "per_chunk"}], ids=str)
@pytest.mark.parametrize("which", ["down_proj_bias", "down_proj"])
def test_Sums_OfBf16OverManyRows_AreInF32(which: str, options: dict[str, Any]) -> None:
    """Gradients are summed over 512 rows: a sum in bf16, as in transformers' grouped_mm for biases, would be found."""
    module, given = make("gpt_oss", experts=4).bfloat16(), rows(MODEL, 4, 1024, 2)
    wanted = tf_compare.reference(module, given, torch.bfloat16)[which]
    sluice.configure(**options)
    found = tf_compare.run(module, given, torch.bfloat16)[which]
    most = 2**-8  # relative to the largest value: each row is rounded once or twice, and so is the sum

    def off(sums: torch.Tensor) -> float:
        return float((sums.double() - wanted).abs().max() / wanted.abs().max())

    shorts = torch.zeros_like(found)
    for token, ids, weights, grad in zip(given.tokens.bfloat16(), given.ids, given.weights, given.grad.bfloat16()):
        for expert, weight in zip(ids, weights):
            row = (weight * grad).bfloat16()
            if which == "down_proj":
                with torch.no_grad():
                    up = token @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
                    row = torch.outer(module._apply_gate(up), row)
            shorts[expert] += row
    assert off(shorts) > 2 * most, ("these rows cannot tell", off(shorts))
    assert off(found) <= most, off(found)


def test_RouteWeights_InTheModelsDtype_GetTheirGradient() -> None:
    module, given = make(), rows(MODEL, 6, 20, 2)
    weights = given.weights.bfloat16().requires_grad_()
    module(given.tokens, given.ids, weights).backward(given.grad)
    wanted = given.weights.bfloat16().float().requires_grad_()
    module(given.tokens, given.ids, wanted).backward(given.grad)
    assert weights.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weights.grad.float(), wanted.grad, rtol=2**-8, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "muse_spark"])
def test_Checkpointing_BothKinds_AsEager(kind: str, reentrant: bool) -> None:
    module = make(kind)
    check(module, rows(MODEL, 6, 30, 2), call=lambda *inputs: checkpoint(module, *inputs, use_reentrant=reentrant))


def test_SavedBytes_AtMostHalfOfGroupedMm() -> None:
    module, given = make(model=64, hidden=96), rows(64, 6, 256, 2)

    def saved(name: str) -> int:
        tokens, weights = given.tokens.clone().requires_grad_(), given.weights.clone().requires_grad_()
        with tf_compare.implementation(module, name):
            return tf_compare.saved_bytes(module, lambda: module(tokens, given.ids, weights))

    sluices, stocks = saved("sluice"), saved("grouped_mm")
    assert sluices <= 0.5 * stocks, (sluices, stocks)


@pytest.mark.usefixtures("one_gemm")
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "openai_privacy_filter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_Generation_PreparedCalls_SameBitsWhateverChanges(kind: str, dtype: torch.dtype) -> None:
    """Calls without gradients are prepared once, but must see changes between them."""
    module = make(kind).to(dtype)

    def compare(given: tf_compare.Rows) -> None:
        tokens = given.tokens.to(dtype)
        wanted = module(tokens.clone().requires_grad_(), given.ids, given.weights).detach()
        for mode in (torch.no_grad, torch.no_grad, torch.no_grad, torch.inference_mode):
            with mode():
                found = module(tokens, given.ids, given.weights)
            assert torch.equal(found, wanted) and not found.requires_grad

    for tokens in (1, 8, 1, 0, 3, 300, 1):
        compare(rows(MODEL, 6, tokens, 2, seed=tokens))
    compare(rows(MODEL, 6, 4, 3))  # another K
    given = rows(MODEL, 6, 5, 2)
    given.ids[2, 1], given.weights[2, 1] = 6, 0.0
    compare(given)
    strided = tf_compare.Rows(
        given.tokens.t().contiguous().t(), given.ids.t().contiguous().t(), given.weights, given.grad
    )
    compare(strided)
    with torch.no_grad():
        module.down_proj.mul_(2)
    compare(given)
    module.gate_up_proj.data = module.gate_up_proj.data.clone()
    compare(given)
    module.down_proj = torch.nn.Parameter(torch.randn_like(module.down_proj))
    compare(given)
    bad = rows(MODEL, 6, 5, 2)
    bad.ids[3, 1] = 9
    with torch.no_grad(), pytest.raises(sluice.errors.InvalidArgument, match="top_k_index"):
        module(bad.tokens.to(dtype), bad.ids, bad.weights)
    compare(given)


@pytest.mark.parametrize("options", [{}, {"chunks": 3, "policy": "S3"}, {"chunks": 3, "policy": "S4"}], ids=str)
@pytest.mark.parametrize("kind", EVERYDAY)
def test_Frozen_AnyOfTheTensors_TheOthersHaveTheirGradientsAndItHasNone(kind: str, options: dict[str, Any]) -> None:
    """Only some experts have rows, with and without a gradient of the tokens."""
    module, given = make(kind), rows(MODEL, 6, 9, 1)
    wanted = tf_compare.reference(module, given, torch.float32)
    names = [name for name, _ in module.named_parameters()]
    sluice.configure(**options)
    for number in range(2 ** len(names)):
        frozen = {name for at, name in enumerate(names) if number >> at & 1}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        for wants in (True, False):
            tokens = given.tokens.clone().requires_grad_(wants)
            out = module(tokens, given.ids, given.weights)
            assert out.requires_grad == (wants or len(frozen) < len(names))
            if out.requires_grad:
                module.zero_grad()
                out.backward(given.grad)
            own = {**dict(module.named_parameters()), **({"tokens": tokens} if wants else {})}
            for name, tensor in own.items():
                assert (tensor.grad is None) == (name in frozen), (name, frozen)
                if tensor.grad is not None:
                    scale = wanted[name].abs().max()
                    torch.testing.assert_close(tensor.grad.double(), wanted[name], rtol=0, atol=2e-5 * float(scale))


def test_Parameters_MovedOrReplaced_AreReadAgain() -> None:
    module, given = make(), rows(MODEL, 6, 20, 2)
    check(module, given)
    module.gate_up_proj.data = module.gate_up_proj.data.clone() * 1.5
    check(module, given)
    with torch.no_grad():
        module.down_proj.mul_(2)
    check(module, given)
    module.down_proj = torch.nn.Parameter(torch.randn_like(module.down_proj))
    check(module, given)
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach().transpose(1, 2).contiguous().transpose(1, 2))
    check(module, given)
