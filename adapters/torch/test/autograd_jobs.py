# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: autograd features that users rely on, such as hooks, checkpoints and experts of the host."""

import gc
import os

import torch
from callback_jobs import runner_of
from layer_cases import Case, close, compare, group, raises, world
from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import PeerRefused
from torch.utils.checkpoint import checkpoint


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
    return True


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

    Without reentry torch compares the sizes of the tensors that both runs saved. Returns how often n was not equal for
    all.
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
    return mixed


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
