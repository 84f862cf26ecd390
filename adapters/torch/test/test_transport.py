# SPDX-License-Identifier: Apache-2.0
"""Tests the transport of a layer's rows on the CPU: Sluice's own TCP connections, or gloo."""

import os
import re
import warnings

import ranks
import torch
from layer_cases import Case, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import Mismatch, NotFound, PeerRefused

MESSAGES = {"gloo:recv": "R", "gloo:send": "S"}  # torch's profiler names gloo's messages so, when they are posted


def _train(group):
    W, rank = world()
    case = Case(W, tokens=(60, 25, 9), n=3, seed=101)
    context = Context(group)
    case.check(case.layer(context), rank)
    sent = context.stats()["bytes_sent"]
    context.close()
    return group.carrier(context.placement), sent


def named():
    """Runs each transport by name, and the transport that Sluice chooses, in one process."""
    ranks = range(world()[0])
    groups = {name: EpGroup.for_ranks(ranks, transport=name) for name in (None, "tcp", "c10d")}
    assert EpGroup.for_ranks(ranks, transport="c10d") is groups["c10d"] is not groups["tcp"]
    return {name: _train(group) for name, group in groups.items()}


def unreachable():
    """Rank 1 does not have the interface. If Sluice chooses the transport, all ranks use gloo, with a log line. If tcp
    is requested, all fail and can continue."""
    W, rank = world()
    if rank == 1:
        os.environ["SLUICE_SOCKET_IFNAME"] = "nosuch0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = _train(EpGroup.for_ranks(range(W)))
    words = [str(w.message) for w in caught if "go through gloo" in str(w.message)]
    group = EpGroup.for_ranks(range(W), transport="tcp")
    refused = None
    try:
        Context(group)
    except (NotFound, PeerRefused) as error:
        refused = type(error).__name__, error.peer, str(error)
    group.close()
    os.environ.pop("SLUICE_SOCKET_IFNAME", None)
    return chosen, words, refused, _train(EpGroup.for_ranks(range(W), transport="tcp"))


def different():
    """If ranks request different transports, all fail at once; afterwards they can agree."""
    W, rank = world()
    try:
        EpGroup.for_ranks(range(W), transport="tcp" if rank == 1 else None)
        raise AssertionError("ranks that differ made a group")
    except Mismatch as error:
        text = str(error)
    return text, _train(EpGroup.for_ranks(range(W), transport="tcp"))


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


def test_Transport_EachByName_TrainsTheSame():
    for found in ranks.run(3, named):
        assert {name: carried for name, (carried, _) in found.items()} == {None: "tcp", "tcp": "tcp", "c10d": "host"}
        assert len({sent for _, sent in found.values()}) == 1 and found["tcp"][1] > 0


def test_Transport_OneRankCannotConnect_AllUseGlooOrAllFail():
    results = ranks.run(3, unreachable)
    for rank, (chosen, words, (kind, peer, text), afterwards) in enumerate(results):
        assert chosen[0] == "host" and len(words) == 1, (chosen, words)
        assert (kind, peer) == (("NotFound", -1) if rank == 1 else ("PeerRefused", 1))
        assert "nosuch0" in text if rank == 1 else "rank 1" in text
        assert afterwards[0] == "tcp"


def test_Transport_RanksThatDiffer_AllAreToldBoth():
    for text, afterwards in ranks.run(2, different):
        assert "rank 0: chosen by Sluice" in text and "rank 1: tcp" in text, text
        assert afterwards[0] == "tcp"


def test_Gloo_EachExchangeOfALayer_PostsItsReceivesBeforeItsSends():
    """If sends come first, gloo uses only one direction of a link at a time."""
    for passes in ranks.run(3, posted):
        for letters in passes:
            assert re.fullmatch("(RRSS)+", letters), letters
            assert len(letters) // 4 >= 9, letters  # the header, then rows to and fro of every chunk
