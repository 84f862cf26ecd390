"""What the ranks of test_transport.py do: layers over gloo and over TCP, and connections that cannot be made."""

import os
import warnings

from layer_cases import Case, compare, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import Mismatch, NotFound, PeerRefused


def _train(group):
    W, rank = world()
    case = Case(W, tokens=(60, 25, 9), n=3, seed=101)
    context = Context(group)
    tokens, ids, weights, params = case.inputs(rank)
    out = case.layer(context)(tokens, ids, weights, params)
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    sent = context.stats()["bytes_sent"]
    context.close()
    return group.carrier(context.placement), sent


def named():
    """Each transport by its name, and what Sluice chooses, side by side in one process."""
    ranks = range(world()[0])
    groups = {name: EpGroup.for_ranks(ranks, transport=name) for name in (None, "tcp", "c10d")}
    assert EpGroup.for_ranks(ranks, transport="c10d") is groups["c10d"] is not groups["tcp"]
    return {name: _train(group) for name, group in groups.items()}


def unreachable():
    """Rank 1 has no such interface. Chosen by Sluice: all use gloo, with a word. Asked for: all fail, and can go on."""
    W, rank = world()
    if rank == 1:
        os.environ["SLUICE_SOCKET_IFNAME"] = "nosuch0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = _train(EpGroup.for_ranks(range(W)))
    words = [str(w.message) for w in caught if "go through gloo" in str(w.message)]
    group = EpGroup.for_ranks(range(W), transport="tcp")
    try:
        Context(group)
        raise AssertionError("a context over connections that cannot be")
    except (NotFound, PeerRefused) as error:
        refused = type(error).__name__, error.peer, str(error)
    group.close()
    os.environ.pop("SLUICE_SOCKET_IFNAME", None)
    return chosen, words, refused, _train(EpGroup.for_ranks(range(W), transport="tcp"))


def different():
    """Ranks that ask for different transports learn of it at once, all of them; afterwards they can agree."""
    W, rank = world()
    try:
        EpGroup.for_ranks(range(W), transport="tcp" if rank == 1 else None)
        raise AssertionError("ranks that differ made a group")
    except Mismatch as error:
        text = str(error)
    return text, _train(EpGroup.for_ranks(range(W), transport="tcp"))
