# SPDX-License-Identifier: Apache-2.0
"""Tests the transport of a layer's rows on the CPU: Sluice's own TCP connections, or gloo."""

import os
import re
import warnings

import pytest
import ranks
import torch
from layer_cases import Case, raises, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import Mismatch, NotFound, PeerRefused

MESSAGES = {"gloo:recv": "R", "gloo:send": "S"}  # torch's profiler names gloo's messages so, when they are posted


def _train(ranks, transport=None):
    """Trains over a group, and returns its transport and the bytes sent."""
    W, rank = world()
    case, group = Case(W, tokens=(60, 25, 9), n=3, seed=101), EpGroup.for_ranks(ranks, transport=transport)
    context = Context(group)
    case.check(case.layer(context), rank)
    sent = context.stats()["bytes_sent"]
    context.close()
    return group.carrier(context.placement), sent


def named():
    """Each transport by name, and the transport that Sluice chooses, train the same, in one process."""
    ranks = range(world()[0])
    groups = {name: EpGroup.for_ranks(ranks, transport=name) for name in (None, "tcp", "c10d")}
    assert EpGroup.for_ranks(ranks, transport="c10d") is groups["c10d"] is not groups["tcp"]
    found = {name: _train(ranks, name) for name in groups}
    assert {name: carried for name, (carried, _) in found.items()} == {None: "tcp", "tcp": "tcp", "c10d": "host"}
    assert len({sent for _, sent in found.values()}) == 1 and found["tcp"][1] > 0


def unreachable():
    """Rank 1 does not have the interface. If Sluice chooses the transport, all ranks use gloo, with a log line. If tcp
    is requested, all fail and can continue."""
    W, rank = world()
    if rank == 1:
        os.environ["SLUICE_SOCKET_IFNAME"] = "nosuch0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _train(range(W))[0] == "host"
    assert sum("go through gloo" in str(w.message) for w in caught) == 1, caught
    group = EpGroup.for_ranks(range(W), transport="tcp")
    with raises(NotFound if rank == 1 else PeerRefused, "nosuch0" if rank == 1 else "rank 1", -1 if rank == 1 else 1):
        Context(group)
    group.close()
    os.environ.pop("SLUICE_SOCKET_IFNAME", None)
    assert _train(range(W), "tcp")[0] == "tcp"


def different():
    """If ranks request different transports, all fail at once and are told both; afterwards they can agree."""
    W, rank = world()
    with raises(Mismatch, "rank 0: chosen by Sluice, rank 1: tcp"):
        EpGroup.for_ranks(range(W), transport="tcp" if rank == 1 else None)
    assert _train(range(W), "tcp")[0] == "tcp"


def posted():
    """Returns a layer's calls to gloo in order, of its forward and its backward: R for a receive, S for a send."""
    W, rank = world()
    # Every token goes to every expert, so that each exchange has a message to each rank and one from it.
    case = Case(W, tokens=(32,), per_rank=1, K=W, n=4, seed=102)
    context = Context(EpGroup.for_ranks(range(W), transport="c10d"))
    layer = case.layer(context, chunking="tokens")
    tokens, ids, weights, params = case.inputs(rank)

    def letters(run):
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the communication lane's too
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, experimental_config=everywhere) as profile:
            result = run()
        events = profile.profiler.kineto_results.events()
        seen = sorted((event.start_ns(), event.name()) for event in events if event.name() in MESSAGES)
        return "".join(MESSAGES[name] for _, name in seen), result

    forward, out = letters(lambda: layer(tokens, ids, weights, params))
    backward, _ = letters(lambda: out.backward(case.cotangents[rank]))
    context.close()
    return forward, backward


@pytest.mark.parametrize("job, world", [(named, 3), (unreachable, 3), (different, 2)])
def test_Job_OnSoManyRanks_HoldsWhatItChecks(job, world):
    ranks.run(world, job)


def test_Gloo_EachExchangeOfALayer_PostsItsReceivesBeforeItsSends():
    """If sends come first, gloo uses only one direction of a link at a time."""
    for passes in ranks.run(3, posted):
        for letters in passes:
            assert re.fullmatch("(RRSS)+", letters), letters
            assert len(letters) // 4 >= 9, letters  # the header, then rows to and fro of every chunk
