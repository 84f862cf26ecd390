# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: the host's own modules as experts."""

import torch
from layer_cases import ACTIVATIONS, Case, close, group, raises, world
from sluice.adapters.torch import CallbackExperts, Context
from sluice.errors import External, InvalidArgument, PeerRefused, Unsupported


class TwoLinears(torch.nn.Module):
    def __init__(self, params, activation):
        super().__init__()
        H, M = params["w1"].shape
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


def _modules(case, rank):
    """Returns the experts of a rank as modules."""
    mine = case.params[rank * case.per_rank : (rank + 1) * case.per_rank]
    return [TwoLinears(p, case.activation) for p in mine]


def runner_of(case, context, rank, callback):
    """Returns (function of leaves, maker of leaves): tokens, weights and all parameters, fused or with modules."""
    if callback:
        modules = _modules(case, rank)
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


def callback_experts():
    """Tests the host's own modules as experts."""
    W, rank = world()
    context = Context(group())
    out = {}
    for n in (1, 2):
        case = Case(W, tokens=(30, 11), bias=True, n=n, idle=(1,), K=1, seed=60 + n)
        modules = _modules(case, rank)
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

    # An exception in a module is raised as External with the exception as its cause. The other ranks learn of it in the
    # next call, which fails on all of them; the call after that works again.
    def broken(rows):
        raise KeyError("no such thing")

    for where in ("forward", "backward"):
        case = Case(W, tokens=(12,), bias=True, seed=63)
        modules = _modules(case, rank)
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
        except External as error:
            broke = error
        assert (broke is not None) == (rank == 0), repr(broke)
        assert broke is None or isinstance(broke.__cause__, KeyError), repr(broke.__cause__)
        if W > 1:
            with raises(External if rank == 0 else PeerRefused):  # the other ranks are told
                case.layer(context)(*case.inputs(rank))
    # The group is still usable.
    case = Case(W, tokens=(12,), bias=True, seed=64)
    case.check(case.layer(context), rank)
    return out


class _Draws(torch.nn.Module):
    """Draws numbers for every row, so that a second run shows whether it had the numbers of the first."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.nn.functional.dropout(self.inner(x), 0.5)


def experts_run_again():
    """Compares keeping everything with policies that replay forward: bits, and the tensors that autograd keeps."""
    W, rank = world()
    context = Context(group())
    for draws in (False, True):
        case = Case(W, tokens=(30, 11), bias=True, n=3, seed=71)
        found = {}
        for policy in (("keep", "keep"), ("keep", "recompute"), ("offload", "recompute"), ("redispatch", "recompute")):
            modules = _modules(case, rank)
            experts = CallbackExperts([_Draws(module) for module in modules] if draws else modules)
            case.restore = policy
            layer = case.layer(context, experts=experts, chunking="tokens")
            tokens, ids, weights, _ = case.inputs(rank)
            packed = []
            torch.manual_seed(5)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, packed=packed: packed.append(t) or t, lambda t: t
            )
            with hooks, torch.autocast("cpu", torch.bfloat16, enabled=not draws):
                y = layer(tokens, ids, weights)
            after_forward = torch.get_rng_state()
            calls = len(modules[0].shapes)
            y.backward(case.cotangents[rank], retain_graph=True)
            assert (len(modules[0].shapes) > calls) == (policy[1] == "recompute"), policy
            assert torch.equal(torch.get_rng_state(), after_forward), "a backward has moved the host's random numbers"
            leaves = [tokens, weights, *[p for module in modules for p in module.parameters()]]
            grads = [leaf.grad.clone() for leaf in leaves]
            y.backward(case.cotangents[rank])  # once more, from the same step
            twice = [torch.equal(leaf.grad, 2 * grad) for leaf, grad in zip(leaves, grads)]
            assert all(twice), (policy, twice)
            graph = sum(t.numel() * t.element_size() for t in packed if t.dtype != torch.uint8)
            found[policy] = [y.detach(), *grads], graph
        kept, bytes_of_graph = found.pop(("keep", "keep"))
        for policy, (tensors, graph) in found.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, kept)), policy
            assert graph < bytes_of_graph, (policy, graph, bytes_of_graph)
    for case.restore, kind, words in (
        (("offload", "keep"), Unsupported, "callback experts take restore_pre_activation keep"),
        (("keep", "offload"), Unsupported, "callback experts take restore_pre_activation keep"),
        (("redispatch", "offload"), Unsupported, "callback experts take restore_pre_activation keep"),
        (("keep", ("keep", "recompute", "keep")), Unsupported, "recomputed in every chunk or in none"),
        ((("offload", "redispatch"), "recompute"), InvalidArgument, "policy.input names 2 chunks, and chunks is 3"),
    ):
        with raises(kind, words):
            case.layer(context, experts=experts)
    return True


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
