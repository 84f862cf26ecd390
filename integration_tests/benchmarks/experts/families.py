"""The experts blocks of all model families in transformers' registry, at the widths of their configs over 2 or 4."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig

from integration_tests.transformers import tf_families

DIVISORS = (2, 4)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
THREADS = (1, 2)
DTYPES = ("float32", "bfloat16")
MOST_BYTES = 8 << 30  # weights and gradients
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True)
class Family:
    """One experts class. model, hidden: as published; parameters: elements at those widths."""

    kind: str
    class_name: str
    model: int
    hidden: int
    experts: int
    top_k: int
    gated: bool
    parameters: int

    def bytes_over(self, divisor: int, dtype: str) -> int:
        """Weights and gradients at the widths over `divisor`."""
        return 2 * self.parameters // divisor**2 * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


class Cell(NamedTuple):
    """One measured case."""

    family: Family
    divisor: int
    tokens: int
    threads: int
    dtype: str

    @property
    def widths(self) -> tuple[int, int]:
        return self.family.model // self.divisor, self.family.hidden // self.divisor

    @property
    def name(self) -> str:
        family, (model, hidden) = self.family, self.widths
        return (
            f"{family.kind} M {model} H {hidden} E {family.experts} K {family.top_k} T {self.tokens} {self.dtype}, "
            f"{self.threads} threads"
        )


def _modules(kind: str, what: str) -> Iterator[Any]:
    for path in sorted((Path(transformers.__file__).parent / "models" / kind).glob(f"{what}_*.py")):
        yield importlib.import_module(f"transformers.models.{kind}.{path.stem}")


def _configs(kind: str) -> Iterator[PretrainedConfig]:
    """Of each config class of a family the one with its own defaults."""
    for module in _modules(kind, "configuration"):
        for found in vars(module).values():
            if not inspect.isclass(found) or not issubclass(found, PretrainedConfig):
                continue
            if found.__module__ == module.__name__:
                with contextlib.suppress(Exception):  # a composite one may want its parts
                    yield found()


def _family(kind: str, class_name: str) -> Family | None:
    cls = next(getattr(module, class_name) for module in _modules(kind, "modeling") if hasattr(module, class_name))
    for config in _configs(kind):
        config._experts_implementation = "eager"
        top_k = next((value for name in _TOP_K if isinstance(value := getattr(config, name, None), int)), None)
        with contextlib.suppress(Exception), torch.device("meta"):  # a config of another part of the model
            module = cls(config)
            stacked = [parameter.shape for parameter in module.parameters() if parameter.dim() == 3]
            experts, *down = stacked[1]
            model, hidden = reversed(down) if module.is_transposed else down
            count = sum(parameter.numel() for parameter in module.parameters())
            return Family(kind, class_name, model, hidden, experts, top_k or 2, bool(module.has_gate), count)
    return None


@functools.cache
def families() -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """(those whose defaults make an experts block of at least two experts, the names of the others)"""
    found, others = [], []
    for kind, class_name in tf_families.classes():
        family = _family(kind, class_name)
        if family is None or family.experts < 2:
            others.append(class_name)
        else:
            found.append(family)
    return tuple(found), tuple(others)


def cells() -> list[Cell]:
    """All that fit into MOST_BYTES, in a fixed order."""
    return [
        Cell(family, divisor, tokens, threads, dtype)
        for family in families()[0]
        for divisor in DIVISORS
        for dtype in DTYPES
        if family.bytes_over(divisor, dtype) <= MOST_BYTES
        for tokens in TOKENS
        for threads in THREADS
    ]


def drawn(count: int, seed: int, kinds: Collection[str] = (), dtypes: Collection[str] = DTYPES) -> list[Cell]:
    """`count` distinct cells; the same for the same seed and transformers. kinds: only these families."""
    everything = [cell for cell in cells() if (not kinds or cell.family.kind in kinds) and cell.dtype in dtypes]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def make_module(cell: Cell) -> Any:
    """The block of a cell. All experts have the same random weights, which no implementation looks for."""
    family, (model, hidden) = cell.family, cell.widths
    with torch.device("meta"):
        module = tf_families.make(family.kind, family.class_name, model, hidden, family.experts)
    module = module.to(getattr(torch, cell.dtype)).to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter[0].normal_(std=model**-0.5)
            parameter[1:] = parameter[0]
    return module
