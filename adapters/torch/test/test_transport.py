# SPDX-License-Identifier: Apache-2.0
"""Tests the transport of a layer's rows on the CPU: Sluice's own TCP connections, or gloo."""

import re

import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)


def test_Transport_EachByName_TrainsTheSame():
    for found in ranks.run(3, "transport_jobs:named"):
        assert {name: carried for name, (carried, _) in found.items()} == {None: "tcp", "tcp": "tcp", "c10d": "host"}
        assert len({sent for _, sent in found.values()}) == 1 and found["tcp"][1] > 0


def test_Transport_OneRankCannotConnect_AllUseGlooOrAllFail():
    results = ranks.run(3, "transport_jobs:unreachable")
    for rank, (chosen, words, (kind, peer, text), afterwards) in enumerate(results):
        assert chosen[0] == "host" and len(words) == 1, (chosen, words)
        assert (kind, peer) == (("NotFound", -1) if rank == 1 else ("PeerRefused", 1))
        assert "nosuch0" in text if rank == 1 else "rank 1" in text
        assert afterwards[0] == "tcp"


def test_Transport_RanksThatDiffer_AllAreToldBoth():
    for text, afterwards in ranks.run(2, "transport_jobs:different"):
        assert "rank 0: chosen by Sluice" in text and "rank 1: tcp" in text, text
        assert afterwards[0] == "tcp"


def test_Gloo_EachExchangeOfALayer_PostsItsReceivesBeforeItsSends():
    """If sends come first, gloo uses only one direction of a link at a time."""
    for passes in ranks.run(3, "transport_jobs:posted"):
        for letters in passes:
            assert re.fullmatch("(RRSS)+", letters), letters
            assert len(letters) // 4 >= 9, letters  # the header, then rows to and fro of every chunk
