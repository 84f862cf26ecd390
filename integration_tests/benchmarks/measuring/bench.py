# SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks: options, ranks, verdict, record and the tables of a page.

A benchmark is a module, or an object, named in cases.py, with

    OPTIONS   its options: name -> Option
    SMOKE     values of these options for a tiny run, which only shows that everything works
    run       measures; returns a line for each missed mark
    PAGE      the page of docs with its tables (optional), and
    tables    the tables by name, made from the runs of its record
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from integration_tests.benchmarks import cases
from integration_tests.benchmarks.measuring import launch, pages, records

PROGRAM = "python -m integration_tests.benchmarks"
# Options that a record's command leaves out, with their number of values: they say where a result goes, or how much of
# a run is done at once.
PLACES = {"--record": 0, "--check": 0, "--resume": 0, "--verbose": 0, "--records": 1, "--most": 1}


@dataclass(frozen=True)
class Option:
    """One option. Its type is the type of the default or of the default's first member; for None it is text."""

    default: Any
    help: str = ""
    choices: Sequence[Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        flag, text = "--" + name.replace("_", "-"), self.help + (" " if self.help else "") + "(%(default)s)"
        if isinstance(self.default, bool):
            parser.add_argument(flag, action="store_true", help=self.help)
            return
        many = isinstance(self.default, (list, tuple))
        example = self.default[0] if many and self.default else self.default
        kind = str if example is None or example == [] else type(example)
        more: dict[str, Any] = {"nargs": "+"} if many else {}
        parser.add_argument(flag, default=self.default, type=kind, choices=self.choices, help=text, **more)


RANKS = Option(2, "ranks, one core each")
SEED = Option(7, "of inputs and weights")
LINK = Option("1gbit", "1gbit, 0.2gbit ...; none: loopback")
GEMM = Option("native", "named, so that all sides multiply with the same kernels")
STOLEN = Option(1.0, "rounds are repeated in which a rank's core lost a larger share to other guests of its host")
QUIET_S = Option(20.0, "seconds of repeated rounds, per cell")


def links(*default: str) -> Option:
    return Option(list(default), "links between ranks; none: loopback")


def pairs(default: int) -> Option:
    return Option(default, "rounds in which each side runs once")


class Bench:
    """One run of a benchmark."""

    def __init__(self, name: str, options: argparse.Namespace, argv: Sequence[str]) -> None:
        self.name, self.options, self.argv = name, options, list(argv)
        self.progress = launch.Progress()
        self.link = ""  # description of the link of the last ranks

    def line(self, text: str) -> None:
        self.progress.line(text)

    def tell(self, row: Mapping[str, Any]) -> None:
        """Prints a result."""
        self.line(records.told(row))

    def refuse(self, why: str) -> NoReturn:
        """Ends the run, because its options cannot be measured."""
        raise SystemExit(f"{self.name}: {why}")

    def picked(self, *names: str) -> dict[str, Any]:
        """These options, for the plan of the ranks."""
        return {name: getattr(self.options, name) for name in names}

    def ask(self, program: Path, plan: Mapping[str, Any], *, ranks: int, link: str, **more: Any) -> Any:
        """The results of `program` on its own ranks (launch.ask)."""
        more.setdefault("deadline_s", 3600)
        more.setdefault("verbose", self.options.verbose)
        found, self.link = launch.ask(program, plan, world_size=ranks, rate=link, progress=self.progress, **more)
        return found

    @property
    def folder(self) -> Path | None:
        """The folder of the record, or None."""
        return self.options.records or (records.FOLDER if self.options.record else None)

    @property
    def command(self) -> str:
        """The command that repeats the run, without paths of this machine."""
        words, given = [], iter(self.argv)
        for word in given:
            flag = word.partition("=")[0]
            if flag not in PLACES:
                words.append(Path(word).name if Path(word).is_absolute() else word)
            elif PLACES[flag] and "=" not in word:
                next(given, None)
        return shlex.join([self.name, *words])

    def keep(self, rows: Sequence[Mapping[str, Any]], raw: Any = None) -> None:
        """Write the results so far: the rows of the tables into the record, and all samples into the raw file."""
        if self.folder is not None:
            records.write(self.folder, self.name, self.command, rows, raw)

    def kept(self) -> list[dict[str, Any]]:
        """The rows of an earlier run of this command."""
        return records.rows(self.folder or records.FOLDER, self.name, self.command)


def parser_of(name: str, module: Any) -> argparse.ArgumentParser:
    text = (module.__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=text[0],
        epilog="\n\n".join(text[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, described in module.OPTIONS.items():
        described.add_to(parser, option)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a mark is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny run: does everything work?")
    parser.add_argument("--record", action="store_true", help="write the committed record and the tables of its page")
    parser.add_argument("--records", type=Path, metavar="FOLDER", help="write the record here instead")
    parser.add_argument("--verbose", action="store_true", help="show what ranks print")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one benchmark, or write the tables of all pages."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{PROGRAM} CASE [--help] [--check] [--smoke] [--record] ...\n{PROGRAM} pages\n")
        print("\n".join(f"  {name:<12} {case.what}" for name, case in cases.CASES.items()))
        return 0
    name, *rest = argv
    if name == "pages":
        pages.write(cases.CASES)
        return 0
    if name not in cases.CASES:
        raise SystemExit(f"no benchmark is called {name!r}; there are: {', '.join(cases.CASES)}")
    module = cases.CASES[name].load()
    parser = parser_of(name, module)
    if "--smoke" in rest:
        parser.set_defaults(**module.SMOKE)
    bench = Bench(name, parser.parse_args(rest), rest)
    missed = module.run(bench)
    for text in missed:
        bench.line(f"missed: {text}")
    bench.line("all marks are reached" if not missed else f"{len(missed)} marks are missed")
    if bench.options.record:
        pages.write([name])
    return int(bool(missed) and bench.options.check)
