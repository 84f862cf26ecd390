# SPDX-License-Identifier: Apache-2.0
"""Draws the list of scenarios of scenarios.py, by a seed that is committed before any measurement.

A scenario is a run of one layer over one link. Its batches have three sizes, with as many tokens in each size. Links,
kinds of experts, skews and kinds of memory are drawn from shuffled decks, so that each value occurs equally often.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

SEED, COUNT = 20261125, 24
LINKS = {"none": 1.5e9, "4gbit": 5e8, "1gbit": 1.25e8, "0.4gbit": 5e7, "0.2gbit": 2.5e7, "0.1gbit": 1.25e7}
# M, H, E, K.
EXPERTS = {
    "coarse": ((256, 1024, 4, 1), (512, 1024, 4, 1), (256, 2048, 8, 1)),
    "fine": ((256, 128, 32, 4), (512, 64, 64, 4), (256, 128, 64, 8)),
}
SKEWS = (1, 2, 5, 10)  # rows of one expert over the mean
KINDS = ("kept", "reuse", "budget")  # everything kept; "reuse": true; a memory budget
SHARES = (0.2, 0.5)  # budgets: 0 is the bytes of the leanest plan, 1 the bytes of keeping everything
SMALL, MIDDLE, LARGE = (256, 512), (1024, 2048, 4096), (4096, 8192, 16384)  # tokens


@dataclass(frozen=True)
class Drawn:
    """skew: of one expert. tokens: the sizes of batches, ascending. budget_share: only for the kind "budget"."""

    name: str
    link: str
    M: int
    H: int
    E: int
    K: int
    skew: int
    kind: str
    budget_share: float | None
    tokens: tuple[int, ...]

    def rank_skew(self, world_size: int) -> float:
        """Rows of the most loaded rank over the mean. This rank has the hot expert."""
        hot = min(1.0, self.skew / self.E)
        others = (self.E // world_size - 1) / (self.E - 1)
        return max(1.0, world_size * (hot + (1 - hot) * others))

    def steps(self, tokens: int) -> float:
        """Steps of this size for each step of the largest size: a run has as many tokens in each size."""
        return self.tokens[-1] / tokens

    def at_most(self, tokens: int) -> Drawn:
        """The same with smaller batches, in proportion."""
        factor = min(1.0, tokens / self.tokens[-1])
        return replace(self, tokens=tuple(dict.fromkeys(max(64, int(one * factor)) for one in self.tokens)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _deck(rng: random.Random, cards: Any, count: int) -> list[Any]:
    """`count` cards, each about equally often, shuffled."""
    deck = [list(cards)[i % len(cards)] for i in range(count)]
    rng.shuffle(deck)
    return deck


def draw(seed: int = SEED, count: int = COUNT) -> list[Drawn]:
    """The list of scenarios."""
    rng = random.Random(seed)
    decks = [_deck(rng, cards, count) for cards in (LINKS, EXPERTS, SKEWS, KINDS)]
    found = []
    for number, (link, experts, skew, kind) in enumerate(zip(*decks)):
        M, H, E, K = rng.choice(EXPERTS[experts])
        share = rng.choice(SHARES) if kind == "budget" else None
        tokens = tuple(sorted({rng.choice(SMALL), rng.choice(MIDDLE), rng.choice(LARGE)}))
        found.append(Drawn(f"{number:02d} {experts} {kind}", link, M, H, E, K, skew, kind, share, tokens))
    return found
