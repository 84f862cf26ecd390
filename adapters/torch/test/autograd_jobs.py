"""What users of autograd rely on: gradients in every manner, hooks, checkpoints, experts of the host."""

import gc
import os

import torch
from callback_jobs import runner_of
from layer_cases import Case, close, compare, group, world
from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import PeerRefused
from torch.utils.checkpoint import checkpoint


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
    run, leaves_of = runner_of(case, context, rank, callback)
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


def checkpoints_outstanding():
    """As a pipeline has them: several forwards wait for their backward, in which each runs again, while n is tried.

    Without reentry torch compares the sizes of what both times saved. Returns how often n was not the same for all.
    """
    W, rank = world()
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions("profile")))
    case = Case(W, tokens=(40, 24), seed=32)
    layer = case.layer(context, num_chunks=0)
    mixed = 0
    for _ in range(12):
        outputs, chunks = [], set()
        for micro in range(3):
            tokens, ids, weights, params = case.inputs(rank)
            outputs.append(checkpoint(layer, tokens, ids.roll(micro, 0), weights, params, use_reentrant=False))
            chunks.add(context.stats()["last_num_chunks"])
        mixed += len(chunks) > 1
        for output in outputs:
            output.backward(case.cotangents[rank])
    return mixed


def live_bytes():
    """Resident bytes; the test has malloc give large blocks back at once."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def checkpoint_memory(callback):
    """Several layers one after the other: bytes held between forward and backward, with and without checkpoints."""
    W, rank = world()
    context = Context(group())
    T, M, layers = 4096, 64, 6
    case = Case(W, per_rank=2, K=2, tokens=(T,), bias=True, n=2, widths=(M, 256), seed=40)
    run, leaves_of = runner_of(case, context, rank, callback)

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
