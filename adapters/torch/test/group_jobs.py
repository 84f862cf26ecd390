# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: groups of several sizes, created by ranks that differ, and joins that fail."""

import warnings
from datetime import timedelta

import torch.distributed as dist
from layer_cases import Case, close, compare, group, raises, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import InvalidArgument, InvalidState, Mismatch, NotFound, PeerRefused, TimedOut


def unequal_groups():
    """Ranks that are in different numbers of the host's groups can still join."""
    W, rank = world()
    for _ in range(2):
        dist.new_group([1, 2], use_local_synchronization=True) if rank > 0 else None
    case = Case(W, tokens=(8,), seed=89)
    case.check(case.layer(Context(group())), rank)
    return True


def join_fails():
    """A rank that cannot take part, or does not join, is named on the others; later they can join."""
    W, rank = world()
    from sluice.adapters.torch import rendezvous

    ranks = tuple(range(W))

    def prepare():
        if rank == 1:
            raise NotFound("no compiler here")

    with raises(NotFound if rank == 1 else PeerRefused, "no compiler here", None if rank == 1 else 1):
        rendezvous.join(ranks, prepare, timedelta(seconds=60))
    dist.barrier()
    if rank == W - 1:
        rendezvous._joined[ranks] += 1
    else:
        with raises(TimedOut, peer=W - 1):
            EpGroup.for_ranks(ranks, timedelta(seconds=4))  # the others need almost none of it
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
            case.check(case.layer(context), g.rank)
    # Experts in an order of the host's own.
    case = Case(4, per_rank=1, tokens=(10, 5), seed=95)
    table = [3, 1, 0, 2]
    tokens, ids, weights, _ = case.inputs(rank)
    mine = table.index(rank)
    params = [{k: v.clone().requires_grad_() for k, v in case.params[mine].items()}]
    out = case.layer(contexts[1], expert_rank=table)(tokens, ids, weights, params)
    close("output", out.detach(), case.expected(rank)[0], 2e-5)
    for wrong in ([1, 0], [0, 0, 1], [], [rank - 1, rank + 4]):
        with raises(InvalidArgument):
            EpGroup.for_ranks(wrong)
    dist.barrier()
    return True


def placements():
    """An error names what is wrong with a placement, and the layer continues as before; then experts move, so that
    ranks have different numbers of them."""
    W, rank = world()
    case = Case(W, tokens=(7,), seed=98)
    layer = case.layer(Context(group()))
    before = layer.placement()
    owners, slots = list(before.expert_rank), list(before.expert_slot)
    turned = slots if rank == 0 else [1 - s for s in slots]
    tokens, ids, weights, params = case.inputs(rank)
    out = None
    for wrong, error_type, text in (
        ((owners, turned), Mismatch, "expert_slot[0]"),
        ((owners, slots[1:]), InvalidArgument, "expert_slot names 3 experts, the layer has 4"),
        ((owners, [0] * len(slots)), InvalidArgument, "slot 0 of rank 0"),
        ((owners, slots, 0), InvalidArgument, "epoch is 0"),
        ((owners, slots), InvalidState, "steps of this layer are outstanding"),
    ):
        if error_type is InvalidState:
            out = layer(tokens, ids, weights, params)
        with raises(error_type, text):
            layer.replace_experts(*wrong)
        assert layer.placement() == before
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    del out
    owners, slots = [1, 1, 0, 1], [2, 0, 0, 1]
    layer.replace_experts(owners, slots)
    assert layer.placement() == (tuple(owners), tuple(slots), before.epoch + 1)
    mine = sorted((slot, e) for e, (owner, slot) in enumerate(zip(owners, slots)) if owner == rank)
    assert layer.num_local_experts == len(mine) == (1, 3)[rank]
    tokens, ids, weights, _ = case.inputs(rank)
    out = layer(
        tokens, ids, weights, [{k: v.clone().requires_grad_() for k, v in case.params[e].items()} for _, e in mine]
    )
    out.backward(case.cotangents[rank])
    for name, got, want in zip(("output", "tokens.grad"), (out.detach(), tokens.grad), case.expected(rank)):
        close(name, got, want, case.tolerance())
    return True
