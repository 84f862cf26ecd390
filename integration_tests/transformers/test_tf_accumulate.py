# SPDX-License-Identifier: Apache-2.0
"""Tests gradients that the library itself adds to an existing `.grad`: the sums are right, and it adds only if no
observer can notice."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import torch
from sluice.adapters.common import contexts
from tf_compare import Rows, rows
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

MODEL, HIDDEN, EXPERTS = 37, 29, 6
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test its own context: one that has seen two threads always leaves gradients to autograd. The GEMM
    library is fixed, as tests compare bits of two calls."""
    monkeypatch.setattr(contexts, "_contexts", {})
    monkeypatch.setenv("SLUICE_GEMM", "native")


def make(kind: str = "mixtral", model: int = MODEL, hidden: int = HIDDEN, experts: int = EXPERTS) -> torch.nn.Module:
    return tf_families.make(kind, model, hidden, experts)


def backward(module: torch.nn.Module, given: Rows, call: Callable[..., Any] | None = None, **how: Any) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    out = (call or module)(given.tokens.to(dtype, copy=True).requires_grad_(), given.ids, given.weights)
    out.backward(given.grad.to(dtype), **how)
    return out


def grads(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.detach().clone() for name, parameter in module.named_parameters()}


def in_place(module: torch.nn.Module) -> int:
    """Returns the number of backwards in which the library added to `.grad`."""
    return sluice.stats(module)["contexts"][0]["passes_in_place"]


def begun(kind: str = "mixtral", dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Rows, dict[str, Any]]:
    """Returns a module with the gradients of one backward, to which the next one would add in place."""
    module, given = make(kind).to(dtype), rows(MODEL, EXPERTS, 23, 2)
    backward(module, given)
    return module, given, grads(module)


def assert_doubled(module: torch.nn.Module, once: dict[str, torch.Tensor]) -> None:
    """Checks that gradients are the sum of two equal backwards to the bit: exactly twice the gradient of one."""
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name]), name


# ---- the sums ----


@pytest.mark.parametrize("options", [{}, {"chunks": 4, "chunking": "tokens", "wgrad_mode": "per_chunk"}], ids=str)
# GPT-OSS is tested in f32 only: 16-bit rows sometimes cross the limit of its clamp, with or without a sum.
@pytest.mark.parametrize(
    "kind, dtype",
    [
        *[(kind, torch.float32) for kind in ("mixtral", "gpt_oss", "nemotron_h")],
        *[(kind, torch.bfloat16) for kind in ("mixtral", "aria", "nemotron_h")],
    ],
    ids=str,
)
def test_MicroSteps_Three_AsEagersSum(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    sluice.configure(**options)
    module = make(kind).to(dtype)
    wanted: dict[str, torch.Tensor] = {}
    steps = [rows(MODEL, EXPERTS, tokens, 2, seed=tokens) for tokens in (40, 7, 64)]
    for given in steps:
        for name, value in tf_compare.reference(module, given, dtype).items():
            if name not in ("output", "tokens", "weights"):
                wanted[name] = wanted.get(name, 0) + value
    module.zero_grad()
    for given in steps:
        backward(module, given)
    assert in_place(module) == 2
    gaps = tf_compare.gaps(grads(module), wanted)
    assert max(gaps.values()) <= tf_compare.TOLERANCES[dtype], gaps


@pytest.mark.parametrize("options", [{}, {"chunks": 5, "chunking": "tokens", "wgrad_mode": "per_chunk"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_Sum_WithAnOldGradient_IsRoundedOnceInSixteenBits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Autograd's sum adds the rows' sum rounded to the dtype. A 16-bit element differs by that rounding and its
    own; an f32 element differs by an addition for each row."""
    sluice.configure(**options)
    module, given = make().to(dtype), rows(MODEL, EXPERTS, 60, 2)
    backward(module, given)
    fresh, old = grads(module), {}
    gen = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        old[name] = torch.randn(parameter.shape, generator=gen).to(dtype)
        parameter.grad = old[name].clone()
    backward(module, given)
    assert in_place(module) == 1
    unit = torch.finfo(dtype).eps / 2
    for name, parameter in module.named_parameters():
        total, part = parameter.grad.double(), fresh[name].double()
        off = (total - (old[name].double() + part)).abs()
        if dtype == torch.float32:
            allowed = 120 * unit * (old[name].double().abs() + part.abs().max())
        else:
            allowed = 1.01 * unit * (total.abs() + part.abs()) + 1e-7
        assert bool((off <= allowed).all()), (name, float((off / allowed).max()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_Checkpointing_BothKinds_AddInPlace(reentrant: bool) -> None:
    module, given, once = begun()
    backward(module, given, lambda *inputs: checkpoint(module, *inputs, use_reentrant=reentrant))
    assert in_place(module) == 1
    wanted = {name: 2 * value for name, value in once.items()}
    assert max(tf_compare.gaps(grads(module), wanted).values()) < 2e-6


def test_Shared_TwiceInOneGraphAndByTorchItself_AllIsAdded() -> None:
    module, given, once = begun()
    other = rows(MODEL, EXPERTS, 11, 2, seed=9)
    wanted = tf_compare.reference(module, other, torch.float32)
    for name, value in once.items():
        getattr(module, name).grad = value.clone()
    loss = (module(given.tokens, given.ids, given.weights) * given.grad).sum()
    loss = loss + (module(other.tokens, other.ids, other.weights) * other.grad).sum()
    (loss + module.down_proj.square().sum()).backward()
    assert in_place(module) == 2
    sums = {name: 2 * value.double() + wanted[name] for name, value in once.items()}
    sums["down_proj"] += 2 * module.down_proj.detach()
    gaps = tf_compare.gaps(grads(module), sums)
    assert max(gaps.values()) <= tf_compare.TOLERANCES[torch.float32], gaps


def test_RetainedGraph_Twice_AddsTwiceAndKeepsNoGradient() -> None:
    module, given, once = begun()
    out = backward(module, given, retain_graph=True)
    out.backward(given.grad)
    assert in_place(module) == 2
    gaps = tf_compare.gaps(grads(module), {name: 3 * g for name, g in once.items()})
    assert max(gaps.values()) < 2e-6
    out = backward(module, given, retain_graph=True)
    gone = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    module.zero_grad()
    assert out.grad_fn is not None and all(reference() is None for reference in gone)


def test_Versions_OfTheGradients_SayThatTheyChanged() -> None:
    module, given, _ = begun()
    before = [parameter.grad._version for parameter in module.parameters()]
    scale = torch.ones((), requires_grad=True)
    kept = (scale * module.down_proj.grad).sum()
    backward(module, given)
    assert in_place(module) == 1
    assert all(parameter.grad._version > then for parameter, then in zip(module.parameters(), before))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


# ---- observers, and gradients of another form ----


def _edge(module: Any) -> Any:
    return get_gradient_edge(module.down_proj).node


def _kept(node: Any, register: str, hook: Any) -> Any:
    return node, getattr(node, register)(hook)


def _set_grad(make_it: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, list[Any]], None]:
    def change(module: Any, _: list[Any]) -> None:
        parameter = module.down_proj
        parameter.grad = make_it(parameter.detach()).copy_(parameter.grad)

    return change


class _Wrapped(torch.Tensor):
    """A tensor all of whose operations go through Python."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def _placed(storage: torch.UntypedStorage, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that is no view, in a storage that other tensors may share."""
    return torch.empty(0).set_(storage, offset, like.shape, like.stride())


def _in_one_allocation(module: Any) -> None:
    """Sets gradients of zeros that are parts of one storage."""
    flat = torch.zeros(module.gate_up_proj.numel() + module.down_proj.numel())
    for parameter, offset in ((module.gate_up_proj, 0), (module.down_proj, module.gate_up_proj.numel())):
        parameter.grad = _placed(flat.untyped_storage(), offset, parameter)


def _in_f32(module: Any) -> None:
    """Gives a parameter in 16 bits a gradient in f32."""
    parameter, old = module.down_proj, module.down_proj.grad.float()
    parameter.grad, parameter.grad_dtype = None, torch.float32
    parameter.grad = old


# What is done to a module with gradients before its next backward. Hooks append to `seen`, and what a change returns is
# kept. The changes in ADDS leave the sum to the library, all others to autograd.
CHANGES: dict[str, Callable[[Any, list[Any]], Any]] = {
    "tensor hook": lambda module, seen: module.down_proj.register_hook(lambda grad: seen.append(grad.shape)),
    "post-accumulate hook": lambda module, seen: module.down_proj.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter.shape)
    ),
    "hook before the node": lambda module, seen: _kept(_edge(module), "register_prehook", lambda _: seen.append(1)),
    "hook after the node": lambda module, seen: _kept(_edge(module), "register_hook", lambda *_: seen.append(1)),
    "hook of several gradients": lambda module, seen: register_multi_grad_hook(
        [module.gate_up_proj, module.down_proj], lambda found: seen.append(len([g for g in found if g is not None]))
    ),
    "a view": _set_grad(lambda p: p.new_zeros(2, *p.shape)[1]),
    "other strides": _set_grad(lambda p: torch.zeros_like(p.transpose(1, 2).contiguous()).transpose(1, 2)),
    "gaps": _set_grad(lambda p: p.new_zeros(*p.shape[:2], p.shape[2] + 3)[..., : p.shape[2]].data),
    "a subclass": _set_grad(lambda p: torch.Tensor._make_subclass(_Wrapped, torch.zeros_like(p), False)),
    "one that requires grad": lambda module, _: module.down_proj.grad.requires_grad_(),
    "f32, bf16": lambda module, _: _in_f32(module),
    "one has none": lambda module, _: setattr(module.down_proj, "grad", None),
    "the option": lambda module, _: sluice.configure(accumulate="autograd"),
    "zeros": lambda module, _: module.zero_grad(set_to_none=False),
    "zeros, bf16": lambda module, _: module.zero_grad(set_to_none=False),
    "zeros in one allocation": lambda module, _: _in_one_allocation(module),
    "frozen gate_up_proj": lambda module, _: module.gate_up_proj.requires_grad_(False),
    "frozen down_proj": lambda module, _: module.down_proj.requires_grad_(False),
}
ADDS = ("zeros", "zeros, bf16", "zeros in one allocation", "frozen gate_up_proj", "frozen down_proj")


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("change", CHANGES)
def test_Backward_AfterAChange_IsAddedOnceAndSeenByHooks(change: str) -> None:
    """The sum has the bits of autograd's, or is within rounding if the library adds rows to numbers."""
    module, given, once = begun(dtype=torch.bfloat16 if "bf16" in change else torch.float32)
    seen: list[Any] = []
    kept = CHANGES[change](module, seen)
    before = {n: 0 if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}
    backward(module, given)
    assert in_place(module) == (change in ADDS) and len(seen) == ("hook" in change) and (kept is not None or not seen)
    for name, parameter in module.named_parameters():
        wanted = before[name] + once[name] if parameter.requires_grad else before[name]
        if change.startswith("frozen"):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(parameter.grad, wanted), name


def test_Gradients_ThatOverlap_AreAutogradsToAddTo() -> None:
    module, given, once = begun()
    up, down = module.gate_up_proj, module.down_proj
    flat = torch.zeros(up.numel())
    up.grad, down.grad = (_placed(flat.untyped_storage(), 0, parameter) for parameter in (up, down))
    backward(module, given)
    assert in_place(module) == 0
    wanted = once["gate_up_proj"].flatten().clone()
    wanted[: down.numel()] += once["down_proj"].flatten()
    torch.testing.assert_close(flat, wanted)


def test_Hook_OnTheLayersOwnNode_SeesTheGradients() -> None:
    module, given, once = begun()
    seen: list[Any] = []
    out = module(given.tokens, given.ids, given.weights)
    out.grad_fn.register_hook(lambda given_out, _: seen.append([grad is not None for grad in given_out[-2:]]))
    out.backward(given.grad)
    assert in_place(module) == 0 and seen == [[True, True]]
    assert_doubled(module, once)


def test_Grad_AskedForByName_LeavesTheGradientsAlone() -> None:
    module, given, once = begun()
    versions = [parameter.grad._version for parameter in module.parameters()]
    out = module(given.tokens, given.ids, given.weights)
    found = torch.autograd.grad(out, list(module.parameters()), given.grad)
    for (name, parameter), grad, version in zip(module.named_parameters(), found, versions):
        assert torch.equal(grad, once[name]) and torch.equal(parameter.grad, once[name])
        assert parameter.grad._version == version
    module(given.tokens, given.ids, given.weights).backward(given.grad, inputs=[module.down_proj])
    assert torch.equal(module.down_proj.grad, 2 * once["down_proj"])
    assert torch.equal(module.gate_up_proj.grad, once["gate_up_proj"])
    assert in_place(module) == 0


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("anomaly", [False, True], ids=["create_graph", "anomaly"])
def test_Backward_WhoseGradientsAreLookedAt_IsAutogradsToAdd(anomaly: bool) -> None:
    module, given, once = begun()
    first = module.down_proj.grad
    with torch.autograd.set_detect_anomaly(anomaly):
        backward(module, given, create_graph=not anomaly)
    assert in_place(module) == 0
    assert anomaly or (module.down_proj.grad is not first and torch.equal(first, once["down_proj"]))
    assert_doubled(module, once)
    module.zero_grad()


def test_Gradient_ThatAutogradRefuses_IsRefused() -> None:
    module, given, once = begun()
    module.down_proj.grad = torch.zeros(()).expand(module.down_proj.shape)
    with pytest.raises(RuntimeError, match="single memory location"):
        backward(module, given)
    with torch.inference_mode():
        module.down_proj.grad = torch.zeros_like(module.down_proj)
    with pytest.raises(RuntimeError, match="inference tensor"):
        backward(module, given)
    assert in_place(module) == 0


def test_Gradient_ThatTheLayerReads_IsAutogradsToAddTo() -> None:
    module, given, _ = begun()
    grad = module.down_proj.grad
    tokens = _placed(grad.untyped_storage(), 0, given.tokens)  # some users do this to save memory
    tokens.copy_(given.tokens)
    wanted = grad.clone() + tf_compare.reference(module, given, torch.float32)["down_proj"].float()
    module.down_proj.grad = grad
    module(tokens, given.ids, given.weights).backward(given.grad)
    assert in_place(module) == 0
    torch.testing.assert_close(module.down_proj.grad, wanted, rtol=1e-4, atol=1e-4)


def test_Autocast_CastsParameters_AutogradAdds() -> None:
    module, given = make(), rows(MODEL, EXPERTS, 23, 2)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(given.tokens, given.ids, given.weights).backward(given.grad)

    step()
    once = grads(module)
    step()
    assert in_place(module) == 0
    assert_doubled(module, once)


def test_Threads_Several_LoseNothing() -> None:
    module, given, once = begun()
    backward(module, given)
    assert in_place(module) == 1
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: backward(module, given), range(30)))
    backward(module, given)
    assert in_place(module) == 1, "after another thread's backward autograd adds, which holds a lock"
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, 33 * once[name], rtol=1e-4, atol=1e-4)


# ---- memory ----


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def _peak_of_a_backward(module: torch.nn.Module, given: Rows) -> float:
    """Returns the peak above the memory resident before, in units of all gradients."""
    out = module(given.tokens, given.ids, given.weights)
    sluice.give_back()
    ctypes.CDLL(None).malloc_trim(0)  # cached free memory would hide allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    out.backward(given.grad)
    return (_status("VmHWM") - before) / sum(parameter.nbytes for parameter in module.parameters())


def _large() -> tuple[torch.nn.Module, Rows]:
    """Returns a module whose gradients dominate all other memory; its permanent memory is already allocated."""
    module, given = make(model=512, hidden=768, experts=16), rows(512, 16, 32, 2)
    assert sum(parameter.nbytes for parameter in module.parameters()) > 60 * MIB
    for _ in range(2):
        backward(module, given)
    return module, given


@pytest.mark.parametrize("accumulate", ["in_place", "autograd"])
def test_Peak_OfABackwardWithGradients_IsWithoutASecondOne(accumulate: str) -> None:
    sluice.configure(accumulate=accumulate)
    peak = _peak_of_a_backward(*_large())
    assert peak < 0.15 if accumulate == "in_place" else 0.9 < peak <= 2.25, peak


@pytest.mark.parametrize(
    "frozen, dtype, least, most",
    [
        ([], torch.float32, 0.9, 1.25),
        ([], torch.bfloat16, 0.9, 1.25),
        (["gate_up_proj"], torch.float32, 0.3, 0.45),
        (["down_proj"], torch.float32, 0.6, 0.8),
        (["gate_up_proj", "down_proj"], torch.float32, 0.0, 0.1),
    ],
    ids=str,
)
def test_Peak_OfABackwardWithoutGradients_IsThoseOfTheTrained(
    frozen: list[str], dtype: torch.dtype, least: float, most: float
) -> None:
    module, given = _large()
    module.to(dtype)
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    given = Rows(given.tokens.to(dtype).requires_grad_(), given.ids, given.weights, given.grad.to(dtype))
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        peak = _peak_of_a_backward(module, given)
    assert least < peak <= most, peak
