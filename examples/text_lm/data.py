# SPDX-License-Identifier: Apache-2.0
"""English text that every Python installation has: the standard library's language reference."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch

VOCABULARY = 128  # ASCII


def corpus() -> torch.Tensor:
    """All topics as one tensor of bytes (about 460,000)."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()


class Batches:
    """Random windows of the text; the same (seed, rank, step) always gives the same windows."""

    def __init__(self, seed: int, rank: int, batch: int, length: int) -> None:
        self.text = corpus()
        self.seed, self.rank, self.batch, self.length = seed, rank, batch, length

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the same bytes one position later, each [batch, length]."""
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003) + step) * 1_009 + self.rank)
        starts = torch.randint(len(self.text) - self.length - 1, (self.batch,), generator=generator)
        windows = torch.stack([self.text[s : s + self.length + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]
