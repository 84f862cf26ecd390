"""What the ranks of test_layer.py do: layers beside a plain loop over experts, in double precision."""

import gc
import math
import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import meeting
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sluice.adapters.torch import CallbackExperts, Context, ContextOptions, EpGroup, MoeLayer
from sluice.adapters.torch.rendezvous import join
from sluice.config import TunerOptions
from sluice.errors import Foreign, InvalidArgument, Mismatch, NotFound, PeerRefused, SluiceError, TimedOut
from torch.utils.checkpoint import checkpoint

M, H = 12, 20
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def world():
    return dist.get_world_size(), dist.get_rank()


def group():
    return EpGroup.for_ranks(list(range(dist.get_world_size())))


def impatient_group(seconds):
    """A group whose passes have this deadline, and whose ranks are given more time for meeting."""
    from sluice.adapters.torch import group as module

    patient, module.join = module.join, lambda ranks, prepare, _: join(ranks, prepare, timedelta(seconds=60))
    try:
        return EpGroup.for_ranks(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))
    finally:
        module.join = patient


def expert_forward(x, p, activation):
    pre = x @ p["w1"].t() + (p["b1"] if "b1" in p else 0)
    mid = ACTIVATIONS[activation](pre)
    if "w3" in p:
        mid = mid * (x @ p["w3"].t() + (p["b3"] if "b3" in p else 0))
    return mid @ p["w2"].t() + (p["b2"] if "b2" in p else 0)


def reference(tokens, ids, weights, params, activation):
    """One rank's output: each route by itself, summed in k order."""
    out = torch.zeros_like(tokens)
    for k in range(ids.shape[1]):
        for e in range(len(params)):
            rows = (ids[:, k] == e).nonzero(as_tuple=True)[0]
            if len(rows):
                part = expert_forward(tokens[rows], params[e], activation) * weights[rows, k : k + 1]
                out = out.index_add(0, rows, part)
    return out


class Case:
    """Inputs of all ranks, the same on every rank because they come from one seed."""

    def __init__(
        self,
        W,
        per_rank=2,
        K=2,
        tokens=(9,),
        gated=False,
        bias=False,
        n=1,
        dtype=torch.float32,
        activation="gelu",
        hot=None,
        drop=0.0,
        idle=(),
        ids_dtype=torch.int64,
        strides="plain",
        wgrad="deferred",
        restore=("keep", "keep"),
        deduplicate=False,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(1000 + seed)

        def rand(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.E, self.K, self.W, self.n = W * per_rank, K, W, n
        self.gated, self.bias, self.dtype, self.activation, self.wgrad = gated, bias, dtype, activation, wgrad
        self.strides, self.per_rank, self.restore, self.deduplicate = strides, per_rank, restore, deduplicate
        names = {"w1": (H, M), "w2": (M, H)}
        if gated:
            names["w3"] = (H, M)
        if bias:
            names.update(b1=(H,), b2=(M,))
        if gated and bias:
            names["b3"] = (H,)
        self.params = [
            {name: rand(*shape, scale=1 / math.sqrt(shape[-1])) for name, shape in names.items()} for _ in range(self.E)
        ]
        self.tokens, self.ids, self.weights, self.cotangents = [], [], [], []
        allowed = [e for e in range(self.E) if e not in idle]
        for r in range(W):
            T = tokens[r % len(tokens)]
            self.tokens.append(rand(T, M))
            self.weights.append(torch.rand(T, K, generator=generator))
            ids = torch.empty(T, K, dtype=torch.int64)
            for t in range(T):
                order = torch.randperm(len(allowed), generator=generator)[:K]
                ids[t] = torch.tensor([allowed[i] for i in order])
            if hot is not None:
                ids[:, 0] = hot
            ids[torch.rand(T, K, generator=generator) < drop] = -1
            self.ids.append(ids.to(ids_dtype))
            self.cotangents.append(rand(T, M))

    def expected(self, rank):
        """Output and all gradients of `rank`, in double."""
        params = [{k: v.double().requires_grad_() for k, v in p.items()} for p in self.params]
        tokens = [t.double().requires_grad_() for t in self.tokens]
        weights = [w.double().requires_grad_() for w in self.weights]
        outs = [reference(t, i, w, params, self.activation) for t, i, w in zip(tokens, self.ids, weights)]
        total = sum((o * c.double()).sum() for o, c in zip(outs, self.cotangents))
        if total.requires_grad:
            total.backward()
        mine = params[rank * self.per_rank : (rank + 1) * self.per_rank]

        def grad(t):
            return torch.zeros_like(t) if t.grad is None else t.grad

        return (
            outs[rank].detach(),
            grad(tokens[rank]),
            grad(weights[rank]),
            [{k: grad(v) for k, v in p.items()} for p in mine],
        )

    def laid_out(self, tensor):
        """The same values with other strides."""
        tensor = tensor.clone()
        if self.strides == "transposed" and tensor.dim() == 2:
            return tensor.t().contiguous().t()
        if self.strides == "padded" and tensor.dim() == 2:
            wide = torch.full((tensor.shape[0], tensor.shape[1] + 3), float("nan"), dtype=tensor.dtype)
            wide[:, : tensor.shape[1]] = tensor
            return wide[:, : tensor.shape[1]]
        return tensor

    def layer(self, context, **options):
        options.setdefault("num_chunks", self.n)
        return MoeLayer(
            context,
            model_width=M,
            hidden_width=H,
            num_experts=self.E,
            top_k=self.K,
            dtype=self.dtype,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias,
            wgrad_mode=self.wgrad,
            restore_input=self.restore[0],
            restore_middle=self.restore[1],
            deduplicate=self.deduplicate,
            **options,
        )

    def inputs(self, rank):
        """Fresh leaves: tokens, ids, weights, params of `rank`."""
        tokens = self.tokens[rank].clone().requires_grad_()
        weights = self.weights[rank].clone().requires_grad_()
        ids = self.ids[rank].clone()
        if self.strides != "plain":
            ids = ids.t().contiguous().t()
        mine = self.params[rank * self.per_rank : (rank + 1) * self.per_rank]
        params = [{k: self.laid_out(v).requires_grad_() for k, v in p.items()} for p in mine]
        return tokens, ids, weights, params

    def tolerance(self):
        return {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[self.dtype]


def close(name, got, want, tolerance):
    assert got is not None, f"{name}: no gradient"
    assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
    if want.numel() == 0:
        return
    error = (got.double() - want).abs().max().item()
    scale = max(1.0, want.abs().max().item())
    assert error <= tolerance * scale, f"{name}: off by {error:.3g}, allowed {tolerance * scale:.3g}"


def compare(case, rank, out, tokens, weights, params, times=1):
    want_out, want_tokens, want_weights, want_params = case.expected(rank)
    tolerance = case.tolerance()
    close("output", out.detach(), want_out, tolerance)
    close("tokens.grad", tokens.grad, times * want_tokens, tolerance)
    close("weights.grad", weights.grad, times * want_weights, max(4 * tolerance, 1e-6))  # f32 whatever the dtype
    for index, (mine, want) in enumerate(zip(params, want_params)):
        for name, tensor in mine.items():
            close(f"expert {index} {name}.grad", tensor.grad, times * want[name], 4 * tolerance)


def cases(W):
    f64, bf16 = torch.float64, torch.bfloat16
    table = {
        "plain": {},
        "one route": dict(K=1, seed=1),
        "four routes": dict(per_rank=4, K=4, seed=2),
        "every expert": dict(per_rank=2, K=2 * W, seed=3),
        "gated": dict(gated=True, activation="silu", seed=4),
        "bias": dict(bias=True, activation="relu", seed=5),
        "gated bias": dict(gated=True, bias=True, activation="gelu_tanh", seed=6),
        "identity": dict(activation="identity", seed=7),
        "two chunks": dict(n=2, tokens=(130,), seed=8),
        "five chunks": dict(n=5, tokens=(300, 171, 9), bias=True, seed=9),
        "chunks per_chunk": dict(n=3, tokens=(200,), wgrad="per_chunk", gated=True, bias=True, seed=10),
        "more chunks than tokens": dict(n=5, tokens=(2, 3, 1), seed=11),
        "chosen chunks": dict(n=0, tokens=(70,), seed=12),
        "uneven": dict(tokens=(1, 40, 7), seed=13),
        "nothing on one rank": dict(tokens=(0, 11, 5), seed=14),
        "nothing anywhere": dict(tokens=(0,), seed=15),
        "nothing in chunks": dict(tokens=(0, 30), n=2, seed=16),
        "dropped": dict(drop=0.4, bias=True, seed=17),
        "all dropped": dict(drop=1.1, seed=18),
        "idle expert": dict(idle=(1,), K=1, bias=True, seed=19),
        "hot expert": dict(hot=0, tokens=(60, 90), n=2, K=1, seed=20),
        "int32 ids": dict(ids_dtype=torch.int32, seed=21),
        "transposed": dict(strides="transposed", gated=True, bias=True, seed=22),
        "padded": dict(strides="padded", bias=True, seed=23),
        "double": dict(dtype=f64, gated=True, bias=True, n=2, tokens=(40, 13), seed=24),
        "S1": dict(restore=("offload", "offload"), n=3, tokens=(60, 25), bias=True, seed=27),
        "S2": dict(restore=("redispatch", "offload"), n=3, tokens=(60, 25), gated=True, seed=28),
        "S3": dict(restore=("offload", "recompute"), n=3, tokens=(60, 25), bias=True, gated=True, seed=29),
        "S4": dict(restore=("redispatch", "recompute"), n=3, tokens=(60, 25), bias=True, seed=30),
        "deduplicated": dict(deduplicate=True, per_rank=4, K=4, n=3, tokens=(60, 25), gated=True, drop=0.1, seed=31),
        "deduplicated bf16": dict(deduplicate=True, per_rank=3, K=3, n=0, tokens=(64, 33), dtype=bf16, seed=32),
        "bf16": dict(dtype=bf16, tokens=(64, 33), seed=25),
        "bf16 gated chunks": dict(dtype=bf16, gated=True, bias=True, activation="silu", n=2, tokens=(100,), seed=26),
    }
    return {name: Case(W, **options) for name, options in table.items()}


def numbers(gemm):
    """Every case, forward and backward. Returns {case: error text or None}."""
    W, rank = world()
    contexts = {name: Context(group(), ContextOptions(gemm=name)) for name in {gemm, "ref"}}
    results = {}
    for name, case in cases(W).items():
        context = contexts["ref" if case.dtype is torch.float64 else gemm]
        try:
            layer = case.layer(context)
            tokens, ids, weights, params = case.inputs(rank)
            out = layer(tokens, ids, weights, params)
            out.backward(case.cotangents[rank])
            compare(case, rank, out, tokens, weights, params)
            with torch.no_grad():
                again = layer(tokens, ids, weights, params)
            assert torch.equal(again, out) and not again.requires_grad
            results[name] = None
        except AssertionError as error:
            results[name] = str(error)
        except Exception:
            results[name] = traceback.format_exc()[-2000:]
            if W > 1:
                break  # the ranks may be out of step
    results["stats"] = contexts[gemm].stats()
    return results


def same_for_all_chunks():
    """Outputs and input gradients do not depend on the number of chunks with the reference products."""
    W, rank = world()
    context = Context(group(), ContextOptions(gemm="ref"))
    case = Case(W, tokens=(90, 33, 50), bias=True, gated=True, seed=50)
    seen = []
    for n in (1, 2, 5):
        layer = case.layer(context, num_chunks=n)
        tokens, ids, weights, params = case.inputs(rank)
        out = layer(tokens, ids, weights, params)
        out.backward(case.cotangents[rank])
        seen.append((out.detach(), tokens.grad, weights.grad))
    return [[torch.equal(a, b) for a, b in zip(seen[0], other)] for other in seen[1:]]


def tuned(folder, mode, calibrate):
    """A context that was told how to choose: it decides, says so, and a second one begins with what it decided."""
    W, rank = world()
    path = Path(folder) / f"decisions{rank}.json"
    results = []
    for _ in range(2):
        options = TunerOptions(mode, calibrate=calibrate, cache=folder, decisions=str(path))
        context = Context(group(), ContextOptions(gemm="ref", tuner=options))
        case = Case(W, tokens=(60, 60, 60), seed=51)
        layer = case.layer(context, num_chunks=0)
        for _ in range(60):
            tokens, ids, weights, params = case.inputs(rank)
            layer(tokens, ids, weights, params).backward(case.cotangents[rank])
        path.write_text(context.decisions_json())
        results.append((context.decisions(), context.tuner_stats(), context.stats()["last_num_chunks"]))
        context.close()
    return results


def autograd_manners():
    """What torch users rely on. Collective cases run on all ranks alike."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(16, 9), bias=True, n=2, seed=30)
    layer = case.layer(context)
    cotangent = case.cotangents[rank]

    # Accumulation over two backward passes.
    tokens, ids, weights, params = case.inputs(rank)
    for _ in range(2):
        out = layer(tokens, ids, weights, params)
        out.backward(cotangent)
    compare(case, rank, out, tokens, weights, params, times=2)

    # Two outstanding forwards, taken back in either order.
    a, b = case.inputs(rank), case.inputs(rank)
    out_a, out_b = layer(a[0], a[1], a[2], a[3]), layer(b[0], b[1], b[2], b[3])
    out_a.backward(cotangent)
    out_b.backward(cotangent)
    compare(case, rank, out_a, a[0], a[2], a[3])
    compare(case, rank, out_b, b[0], b[2], b[3])

    # Twice through one graph, whatever of it was kept.
    for restore in (("keep", "keep"), ("keep", "offload"), ("redispatch", "recompute")):
        case.restore = restore
        layer = case.layer(context)
        tokens, ids, weights, params = case.inputs(rank)
        out = layer(tokens, ids, weights, params)
        out.backward(cotangent, retain_graph=True)
        out.backward(cotangent)
        compare(case, rank, out, tokens, weights, params, times=2)
    case.restore = ("keep", "keep")

    # Where no graph is retained the gradients take the place of the saved pre-activations.
    used = []
    for retain in (True, False):
        layer = case.layer(own := Context(group(), ContextOptions(gemm="ref")))
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(cotangent, retain_graph=retain)
        used.append(own.stats()["slot_bytes"])
    assert used[1] < used[0], used
    layer = case.layer(context)
    try:
        out.backward(cotangent)
        raise AssertionError("a third backward through a freed graph went through")
    except RuntimeError as error:
        assert "second time" in str(error), error

    # An expanded gradient, as sum() gives it.
    tokens, ids, weights, params = case.inputs(rank)
    layer(tokens, ids, weights, params).sum().backward()
    assert tokens.grad is not None

    # Only some inputs want gradients: the same ones on all ranks.
    for wanted in ("tokens", "weights", "params"):
        tokens, ids, weights, params = case.inputs(rank)
        tokens.requires_grad_(wanted == "tokens")
        weights.requires_grad_(wanted == "weights")
        for tensor in [t for p in params for t in p.values()]:
            tensor.requires_grad_(wanted == "params")
        layer(tokens, ids, weights, params).backward(cotangent)
        want = case.expected(rank)
        if wanted == "tokens":
            close("tokens.grad", tokens.grad, want[1], case.tolerance())
            assert weights.grad is None and params[0]["w1"].grad is None
        elif wanted == "weights":
            close("weights.grad", weights.grad, want[2], 4 * case.tolerance())
        else:
            assert tokens.grad is None
            close("w1.grad", params[0]["w1"].grad, want[3][0]["w1"], 4 * case.tolerance())

    # A frozen parameter among others.
    tokens, ids, weights, params = case.inputs(rank)
    params[0]["w2"].requires_grad_(False)
    layer(tokens, ids, weights, params).backward(cotangent)
    assert params[0]["w2"].grad is None and params[0]["w1"].grad is not None

    # Double backward is refused by name.
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    (first,) = torch.autograd.grad(out, tokens, cotangent.clone().requires_grad_(), create_graph=True)
    try:
        first.sum().backward()
        raise AssertionError("double backward went through")
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error

    # An in-place change between forward and backward is caught, on all ranks at once.
    for which in ("tokens", "param"):
        tokens, ids, weights, params = case.inputs(rank)
        middle = tokens * 1
        out = layer(middle, ids, weights, params)
        with torch.no_grad():
            (middle if which == "tokens" else params[0]["w1"]).add_(1)
        try:
            out.backward(cotangent)
            raise AssertionError(f"an in-place change of {which} went unnoticed")
        except RuntimeError as error:
            assert "inplace operation" in str(error), error
    # Changed on one rank only: the others are told.
    tokens, ids, weights, params = case.inputs(rank)
    middle = tokens * 1
    out = layer(middle, ids, weights, params)
    if rank == 0:
        middle.data.add_(0)  # .data is not counted
        with torch.no_grad():
            middle.add_(1)
    try:
        out.backward(cotangent)
        raise AssertionError("a change on rank 0 went unnoticed")
    except PeerRefused as error:
        assert rank != 0 and "inplace operation" in str(error), error
    except RuntimeError as error:
        assert rank == 0 and "inplace operation" in str(error), error

    # The parameters move between forward and backward (ZeRO re-points .data).
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    for tensor in [t for p in params for t in p.values()]:
        tensor.data = tensor.data.clone()
    out.backward(cotangent)
    compare(case, rank, out, tokens, weights, params)

    # Post-accumulate hooks fire once for each parameter, idle experts included.
    tokens, ids, weights, params = case.inputs(rank)
    fired = []
    for index, tensor in enumerate(t for p in params for t in p.values()):
        tensor.register_post_accumulate_grad_hook(lambda _, index=index: fired.append(index))
    layer(tokens, ids, weights, params).backward(cotangent)
    assert sorted(fired) == list(range(len(params) * 4)), fired
    return True


def hooks_and_checkpoints(callback):
    """Saved-tensor hooks see all that is kept; both kinds of checkpointing give the same gradients."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(24, 10), bias=True, n=2, seed=31)
    run, leaves_of = _runner(case, context, rank, callback)
    cotangent = case.cotangents[rank]

    def gradients(wrap):
        leaves = leaves_of()
        out = wrap(leaves)
        out.backward(cotangent)
        return [out.detach(), *[leaf.grad for leaf in leaves if leaf.requires_grad]]

    plain = gradients(lambda leaves: run(*leaves))
    assert all(grad is not None for grad in plain)

    offloaded = []

    def pack(tensor):
        offloaded.append(tensor.numel())
        if tensor.dtype is torch.uint8:  # back at an odd address
            shifted = torch.empty(tensor.numel() + 1, dtype=torch.uint8)[1:]
            return shifted.copy_(tensor)
        return tensor.clone()

    def hooked(leaves):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            return run(*leaves)

    results = {"hooks": gradients(hooked)}
    assert len(offloaded) > 4
    results["reentrant"] = gradients(lambda leaves: checkpoint(run, *leaves, use_reentrant=True))
    results["not reentrant"] = gradients(lambda leaves: checkpoint(run, *leaves, use_reentrant=False))
    with torch.autograd.graph.save_on_cpu():
        results["save_on_cpu"] = gradients(lambda leaves: run(*leaves))
    for name, got in results.items():
        assert len(got) == len(plain)
        for index, (a, b) in enumerate(zip(got, plain)):
            assert torch.equal(a, b), f"{name}: tensor {index} differs by {(a - b).abs().max()}"
    return True


class TwoLinears(torch.nn.Module):
    def __init__(self, params, activation):
        super().__init__()
        self.fc1 = torch.nn.Linear(M, H)
        self.fc2 = torch.nn.Linear(H, M)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.activation = ACTIVATIONS[activation]
        self.shapes = []
        with torch.no_grad():
            for target, name in ((self.fc1, "1"), (self.fc2, "2")):
                target.weight.copy_(params["w" + name])
                target.bias.copy_(params["b" + name])

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return self.fc2(self.activation(self.fc1(x)))


def _runner(case, context, rank, callback):
    """(function of leaves, maker of leaves): tokens, weights and all parameters, fused or by modules."""
    if callback:
        mine = case.params[rank * case.per_rank : (rank + 1) * case.per_rank]
        modules = [TwoLinears(p, case.activation) for p in mine]
        experts = CallbackExperts(modules, view=lambda rows: rows.view(1, 1, *rows.shape))
        layer = case.layer(context, experts=experts)

        def leaves_of():
            tokens, _, weights, _ = case.inputs(rank)
            for module in modules:
                module.zero_grad(set_to_none=True)
            return [tokens, weights, *[p for module in modules for p in module.parameters()]]

        return lambda tokens, weights, *_: layer(tokens, case.ids[rank], weights), leaves_of
    layer = case.layer(context)
    names = list(case.params[0])

    def run(tokens, weights, *flat):
        items = iter(flat)
        params = [{name: next(items) for name in names} for _ in range(case.per_rank)]
        return layer(tokens, case.ids[rank], weights, params)

    def leaves_of():
        tokens, _, weights, params = case.inputs(rank)
        return [tokens, weights, *[p[name] for p in params for name in names]]

    return run, leaves_of


def live_bytes():
    """Resident bytes; the test has malloc give large blocks back at once."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def checkpoint_memory(callback):
    """Several layers one after the other: bytes held between forward and backward, with and without checkpoints."""
    global M, H
    M, H = 64, 256
    W, rank = world()
    context = Context(group())
    T, layers = 4096, 6
    case = Case(W, per_rank=2, K=2, tokens=(T,), bias=True, n=2, seed=40)
    run, leaves_of = _runner(case, context, rank, callback)

    def held(wrap):
        leaves = leaves_of()
        tokens, rest = leaves[0], leaves[1:]
        for _ in range(2):  # the first pass makes the slots
            before = live_bytes()
            x = tokens * 1
            for _ in range(layers):
                x = wrap(x, *rest)
            grown = live_bytes() - before
            x.sum().backward()
            del x
        return grown

    plain = held(run)
    saved = held(lambda *leaves: checkpoint(run, *leaves, use_reentrant=False))
    return plain, saved, layers * T * M * 4


def callback_experts():
    """The host's own modules as experts."""
    W, rank = world()
    context = Context(group())
    out = {}
    for n in (1, 2):
        case = Case(W, tokens=(30, 11), bias=True, n=n, idle=(1,), K=1, seed=60 + n)
        mine = case.params[rank * case.per_rank : (rank + 1) * case.per_rank]
        modules = [TwoLinears(p, case.activation) for p in mine]
        experts = CallbackExperts(modules, view=lambda rows: rows.view(1, 1, *rows.shape))
        layer = case.layer(context, experts=experts)
        tokens, ids, weights, _ = case.inputs(rank)
        seen = []
        modules[0].fc1.weight.register_hook(lambda grad, seen=seen: seen.append(grad.shape) or 2 * grad)
        modules[0].fc1.bias.requires_grad_(False)
        y = layer(tokens, ids, weights)
        y.backward(case.cotangents[rank], retain_graph=True)
        want_out, want_tokens, want_weights, want = case.expected(rank)
        close("output", y.detach(), want_out, 2e-5)
        close("tokens.grad", tokens.grad, want_tokens, 2e-5)
        close("weights.grad", weights.grad, want_weights, 1e-4)
        for index, module in enumerate(modules):
            factor = 2 if index == 0 else 1
            close("fc1", module.fc1.weight.grad, factor * want[index]["w1"], 1e-4)
            close("fc2", module.fc2.weight.grad, want[index]["w2"], 1e-4)
            close("fc2.bias", module.fc2.bias.grad, want[index]["b2"], 1e-4)
            assert torch.equal(module.unused.grad, torch.zeros(3))
        assert modules[0].fc1.bias.grad is None
        assert len(seen) == 1, f"the tensor hook ran {len(seen)} times"
        assert all(len(shape) == 4 and shape[:2] == (1, 1) for module in modules for shape in module.shapes)
        y.backward(case.cotangents[rank])  # again through the retained graphs
        close("fc2 twice", modules[0].fc2.weight.grad, 2 * want[0]["w2"], 1e-4)
        with torch.no_grad():
            assert torch.equal(layer(tokens, ids, weights), y)
        out[n] = len(modules[0].shapes)

    # An exception in a module arrives as what it is, behind FOREIGN. The other ranks learn of it in the next call,
    # which fails on all of them; the one after that is free again.
    def broken(rows):
        raise KeyError("no such thing")

    for where in ("forward", "backward"):
        case = Case(W, tokens=(12,), bias=True, seed=63)
        mine = case.params[rank * case.per_rank : (rank + 1) * case.per_rank]
        modules = [TwoLinears(p, case.activation) for p in mine]
        calls = [broken if where == "forward" else _BreaksBackward(module) for module in modules]
        if rank != 0:
            calls = modules
        experts = CallbackExperts(calls, lambda modules=modules: [list(m.parameters()) for m in modules])
        layer = case.layer(context, experts=experts)
        tokens, ids, weights, _ = case.inputs(rank)
        broke = None
        try:
            y = layer(tokens, ids, weights)
            if where == "backward":
                y.backward(case.cotangents[rank])
        except Foreign as error:
            broke = error
        assert (broke is not None) == (rank == 0), repr(broke)
        assert broke is None or isinstance(broke.__cause__, KeyError), repr(broke.__cause__)
        if W > 1:
            try:
                case.layer(context)(*case.inputs(rank))
                raise AssertionError("the other ranks were not told")
            except (PeerRefused, Foreign) as error:
                assert isinstance(error, Foreign) == (rank == 0), repr(error)
    # The group is still usable.
    case = Case(W, tokens=(12,), bias=True, seed=64)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    y = layer(tokens, ids, weights, params)
    y.backward(case.cotangents[rank])
    compare(case, rank, y, tokens, weights, params)
    return out


class _BreaksBackward:
    def __init__(self, module):
        self.module = module

    def __call__(self, rows):
        out = self.module(rows)
        out.register_hook(self.hook)
        return out

    @staticmethod
    def hook(grad):
        raise KeyError("no such thing")


def refusals():
    """A wrong input on one rank is an error on all, at once, and the group stays usable."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=70)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    wrong = {
        "dtype": lambda: layer(tokens.to(torch.float16), ids, weights, params),
        "complex": lambda: layer(tokens.to(torch.complex64), ids, weights, params),
        "shape": lambda: layer(tokens[:, :-1], ids, weights, params),
        "rank": lambda: layer(tokens[0], ids, weights, params),
        "expert out of range": lambda: layer(tokens, ids + 1000, weights, params),
        "float ids": lambda: layer(tokens, ids.float(), weights, params),
        "half weights": lambda: layer(tokens, ids, weights.half(), params),
        "missing parameter": lambda: layer(tokens, ids, weights, [{"w1": p["w1"]} for p in params]),
        "too few experts": lambda: layer(tokens, ids, weights, params[:-1]),
        "device": lambda: layer(tokens.to("meta"), ids, weights, params),
        "parameter shape": lambda: layer(tokens, ids, weights, [{**p, "w1": p["w2"]} for p in params]),
    }
    culprit = W - 1
    for name, call in wrong.items():
        began = time.monotonic()
        try:
            call() if rank == culprit else layer(tokens, ids, weights, params)
            raise AssertionError(f"{name} went through")
        except InvalidArgument as error:
            assert rank == culprit, (name, error)
        except PeerRefused as error:
            assert rank != culprit and str(culprit) in str(error), (name, error)
        assert time.monotonic() - began < 30, name  # and not the group's 60
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    if W > 1:
        other = Case(W, tokens=(8,), seed=71).layer(context, layer_id=1 if rank == 0 else 2)
        try:
            other(tokens, ids, weights, params)
            raise AssertionError("ranks in different layers went through")
        except Mismatch:
            pass
    return True


def lifetimes():
    """Closed objects say so; layers keep what they need; a group is shared and remade."""
    W, rank = world()
    first = group()
    assert W == 1 or group() is first
    context = Context(first)
    case = Case(W, tokens=(8,), seed=80)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    del context
    gc.collect()
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    out = layer(tokens, ids, weights, params)
    dist.barrier()
    first.close()
    first.close()
    for action in (lambda: layer(tokens, ids, weights, params), lambda: out.backward(case.cotangents[rank])):
        try:
            action()
            raise AssertionError("a closed context went through")
        except SluiceError as error:
            assert "closed" in str(error), error
    if W == 1:
        return True
    second = group()
    assert second is not first and second.alive
    layer = case.layer(Context(second))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    return True


class Rows(torch.utils.data.Dataset):
    def __init__(self, layer):
        self.layer = layer  # travels into the worker by fork

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((M,), float(index))


def forked_workers():
    """DataLoader workers start by fork, run, and exit while layers are in use; a child's handles are inert."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=81)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    loader = torch.utils.data.DataLoader(Rows(layer), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = []
    for batch in loader:
        batches.append(batch.shape)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    out.backward(case.cotangents[rank])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            layer(tokens.detach(), ids, weights.detach(), params)
        except SluiceError as error:
            code = 0 if "fork" in str(error) else 2
        del layer, context
        gc.collect()
        EpGroup.for_ranks().close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    return len(batches)


def outstanding_at_exit():
    """Returns with steps and groups alive: the process must end by itself."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=82)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    global kept_for_exit
    kept_for_exit = [layer(tokens, ids, weights, params) for _ in range(3)]
    kept_for_exit.append(kept_for_exit)  # a cycle, for the last collection
    dist.barrier()
    return True


def exit_during_pass():
    """Returns while a daemon thread waits inside the library for a rank that comes only once this one has ended."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=87)
    layer = case.layer(context := Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    if rank == 0:
        threading.Thread(target=lambda: layer(tokens, ids, weights, params), daemon=True).start()
        while context.calls == 0:
            time.sleep(0.01)
        time.sleep(0.5)  # it is on its way into the wait
    else:
        meeting.until_gone()
    return True


def torn_down():
    """The host destroys all process groups first; then Sluice's say so, can be closed, and can be made anew."""
    W, rank = world()
    first = group()
    case = Case(W, tokens=(8,), seed=88)
    layer = case.layer(Context(first))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), W, is_master=False)  # outlives the group
    store.add("torn_down", 1)
    host = dist.distributed_c10d._get_default_store()  # rank 0's holds the server
    dist.destroy_process_group()
    assert not first.alive
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), world_size=W, rank=rank)
    second = group()
    assert second is not first and second.alive and first.closed
    try:
        out.backward(case.cotangents[rank])
        raise AssertionError("a closed context went through")
    except SluiceError:
        pass
    layer = case.layer(Context(second))
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    for _ in range(3):  # made again and again: no rank may find an old group's addresses
        EpGroup.for_ranks(list(range(W))).close()
    assert group().alive
    dist.barrier()  # rank 0 holds the store that the others may still be asking
    return host is not None


def unequal_groups():
    """Ranks that are in different numbers of the host's groups can still join."""
    W, rank = world()
    for _ in range(2):
        dist.new_group([1, 2], use_local_synchronization=True) if rank > 0 else None
    case = Case(W, tokens=(8,), seed=89)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    return True


def join_fails():
    """A rank that cannot take part, or does not come, is named on the others; later they can join."""
    W, rank = world()
    from sluice.adapters.torch import rendezvous

    ranks = tuple(range(W))

    def prepare():
        if rank == 1:
            raise NotFound("no compiler here")

    try:
        rendezvous.join(ranks, prepare, timedelta(seconds=60))
        raise AssertionError("a join went through")
    except NotFound:
        assert rank == 1
    except PeerRefused as error:
        assert rank != 1 and error.peer == 1 and "no compiler here" in str(error)
    dist.barrier()
    if rank == W - 1:
        rendezvous._joined[ranks] += 1
    else:
        try:
            EpGroup.for_ranks(ranks, timedelta(seconds=4))  # of which the others need next to nothing
            raise AssertionError("a join without the last rank went through")
        except TimedOut as error:
            assert error.peer == W - 1, error
    dist.barrier()
    joined, _ = rendezvous.join(ranks, lambda: None, timedelta(seconds=60))
    joined.leave()
    return True


def several_groups():
    """Four ranks: layers over pairs, over all, and over one rank alone, side by side."""
    W, rank = world()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [EpGroup.for_ranks(pair), EpGroup.for_ranks(range(4)), EpGroup.for_ranks([rank])]
    assert EpGroup.for_ranks(pair) is groups[0] and groups[0].world_size == 2 and groups[2].comm is None
    assert [g.rank for g in groups] == [rank % 2, rank, 0]
    contexts = [Context(g) for g in groups]
    for turn in range(3):
        for g, context in zip(groups, contexts):
            case = Case(g.world_size, tokens=(10, 5), seed=90 + turn)
            tokens, ids, weights, params = case.inputs(g.rank)
            out = case.layer(context)(tokens, ids, weights, params)
            out.backward(case.cotangents[g.rank])
            compare(case, g.rank, out, tokens, weights, params)
    # Experts that lie in an order of the host's own.
    case = Case(4, per_rank=1, tokens=(10, 5), seed=95)
    table = [3, 1, 0, 2]
    tokens, ids, weights, _ = case.inputs(rank)
    mine = table.index(rank)
    params = [{k: v.clone().requires_grad_() for k, v in case.params[mine].items()}]
    out = case.layer(contexts[1], expert_rank=table)(tokens, ids, weights, params)
    close("output", out.detach(), case.expected(rank)[0], 2e-5)
    for wrong in ([1, 0], [0, 0, 1], [], [rank - 1, rank + 4]):
        try:
            EpGroup.for_ranks(wrong)
            raise AssertionError(f"{wrong} went through")
        except InvalidArgument:
            pass
    dist.barrier()
    return True


def silent_peer():
    """The last rank never calls the layer: the others are told who it is at the deadline."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=83)
    layer = case.layer(Context(impatient_group(seconds=3)))
    tokens, ids, weights, params = case.inputs(rank)
    result = None
    if rank == W - 1:
        meeting.hear("told", range(W - 1))
    else:
        meeting.say("here")
        meeting.hear("here", range(W - 1))  # of the three seconds the living need next to nothing
        began = time.monotonic()
        try:
            layer(tokens, ids, weights, params)
        except SluiceError as error:
            result = type(error).__name__, error.peer, time.monotonic() - began, str(error)
        meeting.say("told")
    meeting.part(range(W))
    return result


def killed_peer(posted_first):
    """The last rank is killed, after the others went into their backward or before."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=84)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    others = range(W - 1)
    if rank == W - 1:
        meeting.hear("going" if posted_first else "forward done", others)
        if posted_first:
            time.sleep(0.5)  # so that they wait by then, mostly: what they are told is the same
        meeting.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    meeting.say("forward done")
    if not posted_first:
        meeting.hear("dying", [W - 1])
    meeting.say("going")
    began = time.monotonic()
    result = None
    try:
        out.backward(case.cotangents[rank])
    except SluiceError as error:
        result = type(error).__name__, error.peer, time.monotonic() - began, str(error)
    meeting.part(others)
    return result


def interrupted():
    """Ctrl-C while rank 0 waits for a rank that does not come. Seconds until its loop sees it."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=85)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    took, pressed = None, []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        threading.Timer(0.5, press).start()
        try:
            layer(tokens, ids, weights, params)
        except KeyboardInterrupt:
            took = time.monotonic() - pressed[0]
        meeting.say("interrupted")
    meeting.hear("interrupted", [0])  # a peer that ends would end the wait too
    meeting.part(range(W))
    return took


def traces():
    """Traces and statistics as plain dicts."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(40,), n=2, seed=86)
    layer = case.layer(context, layer_id=7)
    tokens, ids, weights, params = case.inputs(rank)
    context.trace_start()
    layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    events = context.trace_take()
    assert context.trace_take() == []
    context.trace_stop()
    return events, context.stats(reset_peak=True)
