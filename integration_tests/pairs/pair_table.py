# SPDX-License-Identifier: Apache-2.0
"""Makes rows that contain every pair of values of two factors, as far as the host and Sluice support them.

A table has the values that a user may combine (factors), and the rejected combinations with their errors (rules). Rows
of the array contain no rejected pair, because the other pairs of such a row would not be tested. Each rejected
combination has its own row.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs

Row = Mapping[str, str]  # factor: value, for all factors
Values = str | tuple[str, ...]

STOCK, SLUICE = "stock", "sluice"
KEPT = Path(__file__).resolve().parents[2] / ".test" / "pairs"
NOBODY = "nobody"  # no row has these values; the rule's `words` are the reason
ORDERS = 12


@dataclass(frozen=True)
class Rule:
    """Describes a combination of values that `by` refuses, with `words` in its message."""

    when: Mapping[str, Values]
    words: str
    by: str = SLUICE
    stock_hangs: bool = False  # stock fails on one rank, and another one waits for it: only Sluice runs
    given: Mapping[str, str] = field(default_factory=dict)  # other than the defaults in the rule's own rows


@dataclass(frozen=True)
class Case:
    """Describes a test: a row, and its expected result."""

    id: str
    row: Row
    rule: Rule | None = None


def _of(values: Values) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def _holds(when: Mapping[str, Values], row: Row) -> bool:
    """Returns whether a row, which may be partial, has these values."""
    return all(row.get(name) in _of(values) for name, values in when.items())


class Table:
    """Has the factors of a host. The first value of each is its default. Ids consist of values, so all values differ.

    daily: numbers of rows of the array that run every day
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[str]],
        rules: Sequence[Rule] = (),
        daily: int = 6,
    ) -> None:
        self.factors = {name: tuple(values) for name, values in factors.items()}
        self.rules, self._daily = tuple(rules), daily
        words = [value for values in self.factors.values() for value in values]
        assert len(words) == len(set(words)), "two values have the same word"
        for each in self.rules:
            for name, values in (*each.when.items(), *each.given.items()):
                assert set(_of(values)) <= set(self.factors[name]), (name, values)

    def default(self) -> dict[str, str]:
        """Returns the row of first values."""
        return {name: values[0] for name, values in self.factors.items()}

    def name_of(self, row: Row) -> str:
        """Returns the id of a row: its values that are not defaults."""
        return "-".join(row[name] for name, values in self.factors.items() if row[name] != values[0]) or "defaults"

    def is_allowed(self, row: Row) -> bool:
        """Returns whether no rule excludes the known values of a row."""
        return not any(_holds(each.when, row) for each in self.rules)

    def pairs(self) -> set[tuple[str, str, str, str]]:
        """Returns all pairs that rows must contain: (factor, value, other factor, other value)."""
        return {
            (one, a, other, b)
            for one, other in itertools.combinations(self.factors, 2)
            for a, b in itertools.product(self.factors[one], self.factors[other])
            if self.is_allowed({one: a, other: b})
        }

    @functools.cached_property
    def array(self) -> list[dict[str, str]]:
        """Returns rows that contain all pairs; the same in every process. They are cached in .test under a hash of the
        inputs, as each process that collects the tests needs them and they take seconds."""
        made_of = repr((importlib.metadata.version("allpairspy"), self.factors, self.rules))
        kept = KEPT / hashlib.sha256(made_of.encode() + Path(__file__).read_bytes()).hexdigest()
        if not kept.exists():
            KEPT.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._array()))
            new.rename(kept)
        return json.loads(kept.read_text())

    def _array(self) -> list[dict[str, str]]:
        """Returns the rows. allpairspy stops when a row adds no new pair, but other orders of factors give more."""
        rows: list[dict[str, str]] = []
        usable = {  # without values that are refused by themselves, which allpairspy would try repeatedly
            name: [value for value in values if self.is_allowed({name: value})] for name, values in self.factors.items()
        }
        draw, names, wanted = random.Random(0), list(self.factors), self.pairs()
        for _ in range(ORDERS):
            if not wanted - met(rows):
                break
            before = [[row[name] for name in names] for row in rows]
            for values in self._all_pairs({name: usable[name] for name in names}, before):
                rows.append({name: dict(zip(names, values))[name] for name in self.factors})
            draw.shuffle(names)
        for pair in sorted(wanted - met(rows)):
            one, a, other, b = pair
            rest = {name: values for name, values in usable.items() if name not in (one, other)}
            order = {one: (a,), other: (b,), **rest}
            found = None if pair in met(rows) else next(iter(self._all_pairs(order)), None)
            if found is not None:  # otherwise a third value causes the refusal of each row with this pair
                rows.append({name: dict(zip(order, found))[name] for name in self.factors})
        return rows

    def _all_pairs(self, factors: Mapping[str, Sequence[str]], before: Any = None) -> Iterator[Sequence[str]]:
        names = list(factors)

        against = {name: [each for each in self.rules if name in each.when] for name in names}

        def is_allowed(known: Sequence[str]) -> bool:  # only rules of the newest value are left to check
            row = dict(zip(names, known))
            return not any(_holds(each.when, row) for each in against[names[len(known) - 1]])

        return AllPairs([list(values) for values in factors.values()], filter_func=is_allowed, previously_tested=before)

    def cases(self) -> list[Case]:
        """Returns the cases of the array and of the refusals."""
        found = [Case(self.name_of(row), row) for row in self.array]
        for rule in (rule for rule in self.rules if rule.by != NOBODY):
            found += [Case(f"{rule.by}-refuses-{self.name_of(row)}", row, rule=rule) for row in self._rows_of(rule)]
        return found

    def _rows_of(self, each: Rule) -> Iterator[dict[str, str]]:
        for values in itertools.product(*(_of(value) for value in each.when.values())):
            yield {**self.default(), **each.given, **dict(zip(each.when, values))}

    def daily(self) -> list[str]:
        """Returns the ids of the daily rows: each adds the largest number of values that earlier rows lack."""
        rows, chosen, seen = self.array, [], set()
        while len(chosen) < self._daily:
            best = max(rows, key=lambda row: len(set(row.items()) - seen))
            if not set(best.items()) - seen:
                break
            chosen.append(self.name_of(best))
            seen |= set(best.items())
        return chosen

    def params(self) -> list[Any]:
        """Returns the cases for pytest.mark.parametrize: rows that are not daily are `full`."""
        daily = self.daily()
        marks = {True: (), False: pytest.mark.full}
        return [pytest.param(case, id=case.id, marks=marks[case.id in daily]) for case in self.cases()]


def table_of(module: Any) -> Table:
    """Returns the table of a module of tests, by its HOST."""
    return importlib.import_module(f"{module.HOST}_table").TABLE


def met(rows: Iterable[Row]) -> set[tuple[str, str, str, str]]:
    """Returns the pairs that these rows contain."""
    return {(a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(row, 2)}


def layer_options(row: Row, **more: Any) -> dict[str, Any]:
    """Returns the options of a layer that a row names, and `more`, without those that are None."""
    values = {
        "chunks": {"nauto": None, "n1": 1, "n3": 3, "n64": 64}[row["chunks"]],
        "policy": None if row["policy"] in ("kept", "reuse") else row["policy"],
        "reuse": True if row["policy"] == "reuse" else None,
        "memory_budget": "20MiB" if row["budget"] == "budget" else None,
        "deduplicate": {"rows": None, "dedup": True, "node": "node", "dedupauto": "rank_or_node"}[row["deduplicate"]],
        "ranks_per_node": 1 if row["deduplicate"] in ("node", "dedupauto") else None,
        "wire_dtype": {"wire32": None, "wire16": "bf16", "wire8": "int8"}[row["wire"]],
        "transport": row["transport"],
        "chunking": None if row["chunking"] == "cutauto" else row["chunking"],
        "grouping": {"grouped": None, "groupon": "on", "groupoff": "off"}[row["grouping"]],
        "wgrad_mode": {"deferred": "deferred", "perchunk": "per_chunk"}.get(row.get("wgrad", "wgradauto")),
        "accumulate": "autograd" if row["gradients"] == "autograd" else None,
        "gradient_pool": False if row["gradients"] == "nopool" else None,
    }
    return {key: value for key, value in {**values, **more}.items() if value is not None}
