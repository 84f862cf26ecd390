# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: groups of several sizes, created by ranks that differ, and joins that fail."""

import random as random_module
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from layer_cases import Case, close, compare, group, world
from sluice.adapters.torch import Context, ContextOptions, EpGroup
from sluice.errors import InvalidArgument, InvalidState, Mismatch, NotFound, PeerRefused, TimedOut


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
    """A rank that cannot take part, or does not join, is named on the others; later they can join."""
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
            EpGroup.for_ranks(ranks, timedelta(seconds=4))  # the others need almost none of it
            raise AssertionError("a join without the last rank went through")
        except TimedOut as error:
            assert error.peer == W - 1, error
    dist.barrier()
    joined, _ = rendezvous.join(ranks, lambda: None, timedelta(seconds=60))
    joined.leave()
    return True


def several_groups():
    """Four ranks run layers over pairs, over all ranks, and over one rank, in one process each."""
    W, rank = world()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [EpGroup.for_ranks(pair), EpGroup.for_ranks(range(4)), EpGroup.for_ranks([rank])]
    assert EpGroup.for_ranks(pair) is groups[0] and groups[0].world_size == 2 and groups[2].comm is None
    assert [g.rank for g in groups] == [rank % 2, rank, 0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert EpGroup.for_ranks(pair, groups[0].timeout) is groups[0] and not told
        assert EpGroup.for_ranks(pair, timedelta(seconds=7)) is groups[0]
    assert len(told) == 1 and "7 s has no effect" in str(told[0].message), told
    contexts = [Context(g) for g in groups]
    for turn in range(3):
        for g, context in zip(groups, contexts):
            case = Case(g.world_size, tokens=(10, 5), seed=90 + turn)
            tokens, ids, weights, params = case.inputs(g.rank)
            out = case.layer(context)(tokens, ids, weights, params)
            out.backward(case.cotangents[g.rank])
            compare(case, g.rank, out, tokens, weights, params)
    # Experts in an order of the host's own.
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


def moving_experts(gated=True, uneven=False):
    """Experts change owner and slot every step or two, with their weights: the bits are those without moves."""
    W, rank = world()
    case = Case(W, tokens=(11, 6), seed=97, gated=gated, bias=True, n=2)
    context = Context(group(), ContextOptions(gemm="native"))  # sums of a row do not depend on other rows
    options = {"chunking": "tokens"}
    runs = [case.layer(context, **options) for _ in range(2)]
    weights_of = [[{k: v.clone() for k, v in p.items()} for p in case.params] for _ in runs]
    random = random_module.Random(5)
    for step in range(8):
        outs = []
        for run, (layer, experts) in enumerate(zip(runs, weights_of)):
            if run == 1 and step % 3 != 1:
                owners = [e // case.per_rank for e in range(case.E)]
                random.shuffle(owners)
                if uneven:
                    owners = [random.randrange(W) for _ in owners]
                slots = slots_of(owners, W, random)
                layer.replace_experts(owners, slots)
                assert layer.placement() == (tuple(owners), tuple(slots), layer.placement().epoch)
                assert layer.num_local_experts == owners.count(rank)
            place = layer.placement()
            mine = sorted((s, e) for e, (r, s) in enumerate(zip(place.expert_rank, place.expert_slot)) if r == rank)
            tokens, ids, weights, _ = case.inputs(rank)
            params = [{k: v.clone().requires_grad_() for k, v in experts[e].items()} for _, e in mine]
            out = layer(tokens, ids, weights, params)
            if run == 1 and step == 4:
                owners, slots = list(place.expert_rank), list(place.expert_slot)
                try:
                    layer.replace_experts(owners, slots)
                    raise AssertionError("experts were replaced while a forward waits for its backward")
                except InvalidState as error:
                    assert "steps of this layer are outstanding" in str(error), error
            out.backward(case.cotangents[rank])
            news = [None] * W
            dist.all_gather_object(
                news, {e: {k: (v - 0.005 * v.grad).detach() for k, v in p.items()} for (_, e), p in zip(mine, params)}
            )
            for new in news:
                for e, values in new.items():
                    experts[e] = values
            outs.append((out.detach(), tokens.grad, weights.grad))
            del out
        assert outs[0][0].isfinite().all() and all(torch.equal(a, b) for a, b in zip(*outs)), step
    for one, other in zip(*weights_of):
        assert all(torch.equal(one[k], other[k]) for k in one)
    return True


def slots_of(owners, W, random):
    """Returns a slot on its rank for each expert, in random order."""
    slots, order = [0] * len(owners), list(range(len(owners)))
    random.shuffle(order)
    count = [0] * W
    for e in order:
        slots[e] = count[owners[e]]
        count[owners[e]] += 1
    return slots


def placements_that_differ():
    """The error names the difference, and the layer continues as before."""
    W, rank = world()
    case = Case(W, tokens=(7,), seed=98)
    layer = case.layer(Context(group()))
    before = layer.placement()
    owners = list(before.expert_rank)
    slots = list(before.expert_slot)
    turned = slots if rank == 0 else [1 - s for s in slots]
    for wrong, error_type, text in (
        ((owners, turned), Mismatch, "expert_slot[0]"),
        ((owners, slots[1:]), InvalidArgument, "expert_slot names 3 experts, the layer has 4"),
        ((owners, [0] * len(slots)), InvalidArgument, "slot 0 of rank 0"),
        ((owners, slots, 0), InvalidArgument, "epoch is 0"),
    ):
        try:
            layer.replace_experts(*wrong)
            raise AssertionError(f"{wrong} went through")
        except error_type as error:
            assert text in str(error), error
        assert layer.placement() == before
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    return True
