"""Groups of ranks: of several sizes, made by ranks that differ, and joins that fail."""

import warnings
from datetime import timedelta

import torch.distributed as dist
from layer_cases import Case, close, compare, group, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import InvalidArgument, NotFound, PeerRefused, TimedOut


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
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert EpGroup.for_ranks(pair, groups[0].timeout) is groups[0] and not told
        assert EpGroup.for_ranks(pair, timedelta(seconds=7)) is groups[0]
    assert len(told) == 1 and "7 s is not in effect" in str(told[0].message), told
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
