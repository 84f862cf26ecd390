# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: the host's own modules as experts, and autograd features that users rely on, such as hooks,
checkpoints and backwards that add to existing gradients."""

import gc
import os

import torch
from layer_cases import ACTIVATIONS, Case, close, compare, group, raises, world
from sluice.adapters.torch import CallbackExperts, Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import External, InvalidArgument, PeerRefused, Unsupported
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class TwoLinears(torch.nn.Module):
    def __init__(self, params, activation):
        super().__init__()
        H, M = params["w1"].shape
        self.fc1 = torch.nn.Linear(M, H)
        self.fc2 = torch.nn.Linear(H, M)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.activation = ACTIVATIONS[activation]
        self.shapes = []
        self.to(params["w1"].dtype)
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


def callback_experts(device=None):
    """Tests the host's own modules as experts. Returns where they ran."""
    W, rank = world()
    context = Context(group(), device=device)
    dtypes = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for n, dtype in zip((1, 2, 3, 2, 2), dtypes):
        case = Case(W, tokens=(30, 11), bias=True, n=n, dtype=dtype, idle=(1,), K=1, seed=60 + n)
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
        tolerance = case.tolerance()
        close("output", y.detach(), want_out, tolerance)
        close("tokens.grad", tokens.grad, want_tokens, tolerance)
        close("weights.grad", weights.grad, want_weights, max(5 * tolerance, 1e-6))
        for index, module in enumerate(modules):
            factor = 2 if index == 0 else 1
            close("fc1", module.fc1.weight.grad, factor * want[index]["w1"], 5 * tolerance)
            close("fc2", module.fc2.weight.grad, want[index]["w2"], 5 * tolerance)
            close("fc2.bias", module.fc2.bias.grad, want[index]["b2"], 5 * tolerance)
            assert not module.unused.grad.any()
        assert modules[0].fc1.bias.grad is None
        assert len(seen) == 1, f"the tensor hook ran {len(seen)} times"
        assert all(len(shape) == 4 and shape[:2] == (1, 1) for module in modules for shape in module.shapes)
        y.backward(case.cotangents[rank])  # again through the retained graphs
        close("fc2 twice", modules[0].fc2.weight.grad, 2 * want[0]["w2"], 5 * tolerance)
        with torch.no_grad():
            assert torch.equal(layer(tokens, ids, weights), y)

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
    return context.placement


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


class Manners:
    """Features that torch users rely on. Collective cases run on all ranks."""

    def __init__(self):
        W, self.rank = world()
        self.context = Context(group())
        self.case = Case(W, tokens=(16, 9), bias=True, n=2, seed=30)
        self.layer = self.case.layer(self.context)
        self.cotangent = self.case.cotangents[self.rank]

    def inputs(self):
        return self.case.inputs(self.rank)

    def compare(self, *given, **more):
        compare(self.case, self.rank, *given, **more)

    def gradients_add_up_over_two_backwards(self):
        self.case.check(self.layer, self.rank, passes=2)

    def two_outstanding_forwards_go_back_in_either_order(self):
        a, b = self.inputs(), self.inputs()
        out_a, out_b = self.layer(*a), self.layer(*b)
        out_a.backward(self.cotangent)
        out_b.backward(self.cotangent)
        self.compare(out_a, a[0], a[2], a[3])
        self.compare(out_b, b[0], b[2], b[3])

    def twice_through_one_graph_and_no_third_time(self):
        """Tests each restore policy."""
        for restore in (("keep", "keep"), ("keep", "offload"), ("redispatch", "recompute")):
            self.case.restore = restore
            layer = self.case.layer(self.context)
            tokens, ids, weights, params = self.inputs()
            out = layer(tokens, ids, weights, params)
            out.backward(self.cotangent, retain_graph=True)
            out.backward(self.cotangent)
            self.compare(out, tokens, weights, params, times=2)
        self.case.restore = ("keep", "keep")
        with raises(RuntimeError, "second time"):
            out.backward(self.cotangent)

    def gradients_take_the_place_of_saved_rows_where_no_graph_is_retained(self):
        used = []
        for retain in (True, False):
            layer = self.case.layer(own := Context(group(), ContextOptions(gemm="ref")))
            tokens, ids, weights, params = self.inputs()
            layer(tokens, ids, weights, params).backward(self.cotangent, retain_graph=retain)
            used.append(own.stats()["slot_bytes"])
        assert used[1] < used[0], used

    def an_expanded_gradient_is_taken(self):
        """sum() gives such a gradient."""
        tokens, ids, weights, params = self.inputs()
        self.layer(tokens, ids, weights, params).sum().backward()
        assert tokens.grad is not None

    def only_some_inputs_want_gradients(self):
        """The same inputs require gradients on all ranks."""
        for wanted in ("tokens", "weights", "params"):
            tokens, ids, weights, params = self.inputs()
            tokens.requires_grad_(wanted == "tokens")
            weights.requires_grad_(wanted == "weights")
            for tensor in [t for p in params for t in p.values()]:
                tensor.requires_grad_(wanted == "params")
            self.layer(tokens, ids, weights, params).backward(self.cotangent)
            want, tolerance = self.case.expected(self.rank), self.case.tolerance()
            if wanted == "tokens":
                close("tokens.grad", tokens.grad, want[1], tolerance)
                assert weights.grad is None and params[0]["w1"].grad is None
            elif wanted == "weights":
                close("weights.grad", weights.grad, want[2], 4 * tolerance)
            else:
                assert tokens.grad is None
                close("w1.grad", params[0]["w1"].grad, want[3][0]["w1"], 4 * tolerance)

    def a_frozen_parameter_has_no_gradient(self):
        tokens, ids, weights, params = self.inputs()
        params[0]["w2"].requires_grad_(False)
        self.layer(tokens, ids, weights, params).backward(self.cotangent)
        assert params[0]["w2"].grad is None and params[0]["w1"].grad is not None

    def double_backward_is_refused_by_name(self):
        tokens, ids, weights, params = self.inputs()
        out = self.layer(tokens, ids, weights, params)
        (first,) = torch.autograd.grad(out, tokens, self.cotangent.clone().requires_grad_(), create_graph=True)
        with raises(RuntimeError, "once_differentiable"):
            first.sum().backward()

    def an_in_place_change_is_caught(self):
        """A change between forward and backward, on all ranks."""
        for which in ("tokens", "param"):
            tokens, ids, weights, params = self.inputs()
            middle = tokens * 1
            out = self.layer(middle, ids, weights, params)
            with torch.no_grad():
                (middle if which == "tokens" else params[0]["w1"]).add_(1)
            with raises(RuntimeError, "inplace operation"):
                out.backward(self.cotangent)

    def an_in_place_change_on_one_rank_is_told_to_the_others(self):
        tokens, ids, weights, params = self.inputs()
        middle = tokens * 1
        out = self.layer(middle, ids, weights, params)
        if self.rank == 0:
            middle.data.add_(0)  # .data is not counted
            with torch.no_grad():
                middle.add_(1)
        with raises(RuntimeError if self.rank == 0 else PeerRefused, "inplace operation"):
            out.backward(self.cotangent)

    def parameters_may_move_before_backward(self):
        """ZeRO re-points .data."""
        tokens, ids, weights, params = self.inputs()
        out = self.layer(tokens, ids, weights, params)
        for tensor in [t for p in params for t in p.values()]:
            tensor.data = tensor.data.clone()
        out.backward(self.cotangent)
        self.compare(out, tokens, weights, params)

    def hooks_fire_once_for_each_parameter(self):
        """Hooks after the accumulation, also of idle experts."""
        tokens, ids, weights, params = self.inputs()
        fired = []
        for index, tensor in enumerate(t for p in params for t in p.values()):
            tensor.register_post_accumulate_grad_hook(lambda _, index=index: fired.append(index))
        self.layer(tokens, ids, weights, params).backward(self.cotangent)
        assert sorted(fired) == list(range(len(params) * 4)), fired


def autograd_manners():
    manners = Manners()
    for name in vars(Manners):
        if not name.startswith("_") and name not in ("inputs", "compare"):
            getattr(manners, name)()


def hooks_and_checkpoints():
    """Saved-tensor hooks see all saved tensors; both kinds of checkpointing give the same gradients. Tests fused
    experts, and modules of the host."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(24, 10), bias=True, n=2, seed=31)
    for callback in (False, True):
        _hooks_and_checkpoints(case, rank, *runner_of(case, context, rank, callback))


def _hooks_and_checkpoints(case, rank, run, leaves_of):
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


def checkpoints_outstanding():
    """Keeps several forwards, which their backwards replay, outstanding as in a pipeline while n is being tuned.

    Without reentry torch compares the sizes of the tensors that both runs saved.
    """
    W, rank = world()
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(mode="profile")))
    case = Case(W, tokens=(40, 24), seed=32)
    layer = case.layer(context, chunks=0)
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
    assert mixed > 0, "n was equal for all"


def live_bytes():
    """Returns resident bytes. The test makes malloc return large blocks at once."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def checkpoint_memory():
    """Returns bytes that several layers hold between forward and backward, with and without checkpoints."""
    W, rank = world()
    context = Context(group())
    T, M, layers = 4096, 64, 6
    case = Case(W, per_rank=2, K=2, tokens=(T,), bias=True, n=2, widths=(M, 256), seed=40)
    run, leaves_of = runner_of(case, context, rank, callback=False)

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


CASES = {
    "plain": {},
    "gated bias chunks": dict(gated=True, bias=True, n=3, wgrad="per_chunk"),
    "transposed": dict(strides="transposed", n=2),
    "idle expert": dict(idle=(0,), hot=1),
    "nothing on one rank": dict(tokens=(11, 0)),
    "deduplicated": dict(deduplicate=True, per_rank=3, K=3),
    "bf16": dict(dtype=torch.bfloat16, n=2),
}


def micro_steps():
    """Three backwards over the same rows give three times the gradient; the last two are added in place."""
    W, rank = world()
    context = Context(group())
    for seed, (name, options) in enumerate(CASES.items()):
        case = Case(W, **{"tokens": (16, 9), "seed": 60 + seed, **options})
        before, layer = context.passes_in_place, case.layer(context)
        case.check(layer, rank, passes=3)
        assert context.passes_in_place - before == 2, (name, context.passes_in_place)
        layer.close()
    assert context.stats()["passes_in_place"] == 2 * len(CASES)

    # Padded parameters get gradients with other strides, without gaps, so autograd adds.
    case = Case(W, strides="padded", seed=70)
    case.check(case.layer(context, accumulate="in_place"), rank, passes=2)
    assert context.passes_in_place == 2 * len(CASES)


class _Experts(torch.nn.Module):
    def __init__(self, case, layer):
        super().__init__()
        self.layer = layer
        names = case.params[0]
        self.experts = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: torch.nn.Parameter(p[name].clone()) for name in names}) for p in case.params
        )

    def forward(self, tokens, ids, weights):
        return self.layer(tokens, ids, weights, [dict(expert.items()) for expert in self.experts])


def data_parallel():
    """Checks gradients after steps without and with reduction under DDP, whose hooks reduce added gradients."""
    W, rank = world()
    context = Context()  # every rank has all experts
    case = Case(1, per_rank=3, tokens=(16,), seed=80)
    module = _Experts(case, case.layer(context))
    wrapped = DistributedDataParallel(module)
    tokens, ids, weights, _ = case.inputs(0)
    cotangent = case.cotangents[0]
    with wrapped.no_sync():
        wrapped(tokens, ids, weights).backward(cotangent)
    wrapped(tokens, ids, weights * (1 + rank)).backward(cotangent)
    assert context.passes_in_place == 0
    once = case.expected(0)[3]
    scaled = sum(2 + other for other in range(W)) / W  # route weights scale the gradients of parameters
    for index, expert in enumerate(module.experts):
        for name, parameter in expert.items():
            close(f"expert {index} {name}", parameter.grad, scaled * once[index][name], 8 * case.tolerance())
    module.layer.close()
