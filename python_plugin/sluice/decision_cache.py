# SPDX-License-Identifier: Apache-2.0
"""Stores decisions that later runs start from: the file of "tuner": {"decisions": ...}.

One file serves all machines. An answer is valid only for the machine that it was found on, so answers are stored by a
text that describes the machine. The file is replaced whole, under a lock. A damaged file of Sluice is renamed, and a
file that cannot be read or written is ignored, each with a message. A file that Sluice did not write is refused and
never changed, since the path may be mistyped. A file of `sluice.export_decisions` may be given instead: its answers are
then used as those of this machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from sluice import cache_folder, decision_log, file_lock, file_trust
from sluice.decision_log import Damaged
from sluice.errors import InvalidArgument

FORM = 2
EXPORTED = 3  # the form that the library writes; the library reads form 1 as well
KEPT = 4096  # answers of one machine
NAME = "kept_decisions.json"
_OURS = re.compile(rb'\s*\{\s*"sluice_(kept_)?decisions"')  # the beginning of all our files, also of truncated ones

Answers = list[dict[str, Any]]


class NotOurs(InvalidArgument):
    """The file is not one of ours, or of another version. It is not changed."""


def place(named: str | bool, cache: str | None) -> str:
    """Returns the path of the file. True: the file in the cache folder."""
    return named if isinstance(named, str) else os.path.join(cache_folder.place(cache), NAME)


def machine_words(device: str, link: str, world_size: int, hosts: str, gemm: str, version: str) -> str:
    """Describes all that an answer depends on in addition to its layer. Calibrations have the same key, with sizes."""
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return (
        f"version {version}; device {device}, {_processor()}, {_cores()}, {threads} threads; "
        f"link {link}, {world_size} ranks on {hosts}; GEMMs {gemm}"
    )


def _cores() -> str:
    """Returns the cores on which this process may run. A CPU quota of a control group is ignored."""
    return f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, colon, value = line.partition(":")
            if colon and name.strip() == "model name":
                return value.strip()
    return "unknown processor"


def read(path: str, machine: str) -> Answers:
    """Returns this machine's answers; none if there is no file. Raises Damaged or NotOurs for an unusable file."""
    found = _machines(path, machine).get(machine, [])
    if not all(_is_answer(answer) for answer in found):
        raise Damaged("its answers are not a list of layers with rows")
    return found


def check_ours(path: str) -> None:
    """Raises NotOurs if neither the name nor the beginning of an existing file shows that Sluice wrote it."""
    if _is_named_by_us(path):
        return
    try:
        with open(path, "rb") as file:
            begin = file.read(64)
    except FileNotFoundError:
        return
    if not _OURS.match(begin):
        raise NotOurs(
            f'"tuner": decisions {path!r} is a file that Sluice did not write; it is not changed. Give a path that '
            "does not exist yet, or a file that an earlier run wrote"
        )


def _is_named_by_us(path: str) -> bool:
    return os.path.basename(path) == NAME


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("layer"), str) and type(answer.get("rows")) is int


def _machines(path: str, machine: str) -> dict[str, Answers]:
    check_ours(path)
    data = decision_log.load(path, {"sluice_kept_decisions": FORM, "machines": {}})
    if isinstance(data, dict) and data.get("sluice_decisions") in (1, EXPORTED):
        data = {"sluice_kept_decisions": FORM, "machines": {machine: data.get("answers")}}
    if not isinstance(data, dict) or data.get("sluice_kept_decisions") != FORM:
        if _is_named_by_us(path):
            raise Damaged("written by another version, or has no decisions")
        raise NotOurs(
            f'"tuner": decisions {path!r} was written by another version of Sluice; it is not changed. Give another '
            "path, or run that version"
        )
    machines = data.get("machines")
    if not isinstance(machines, dict) or not all(isinstance(answers, list) for answers in machines.values()):
        raise Damaged("it has no answers by machine")
    return machines


def machines(path: str) -> dict[str, Answers]:
    """Returns the answers of a file by machine; none if there is no file."""
    found = _machines(path, "this machine")
    if not all(_is_answer(answer) for answers in found.values() for answer in answers):
        raise Damaged("its answers are not a list of layers with rows")
    return found


def line(answer: dict[str, Any]) -> str:
    """Returns one answer as a line for people."""
    plan = (
        f", T_DI {answer['restore_input']}, T_M {answer.get('restore_pre_activation')}"
        if "restore_input" in answer
        else ""
    )
    if "deduplicate" in answer:
        plan += f", deduplicate {answer['deduplicate']}{', grouped' if answer.get('grouped') else ''}"
    wgrad = str(answer.get("wgrad_mode")).replace("_", " ")
    return (
        f"layers {answer['layer']}, {answer['rows']} rows: n {answer.get('num_chunks')}{plan}, weight gradients {wgrad}"
    )


def text_of(answers: Answers) -> str:
    """Returns the answers as text that the library reads."""
    return json.dumps({"sluice_decisions": EXPORTED, "answers": answers}) + "\n"


def take(path: str, machine: str, accept: Callable[[str], None]) -> str:
    """Passes this machine's answers to `accept` as text, and returns the text; "" if there are none.

    A file of ours that is unusable, or that `accept` refuses with ValueError, is renamed, with a message on stderr.
    NotOurs and other errors of `accept` are passed on, and the file is not changed.
    """
    try:
        answers = read(path, machine)
        text = text_of(answers) if answers else ""
        if text:
            accept(text)
        return text
    except OSError as error:
        _say(f"{path} cannot be read ({error.strerror}): training continues without its decisions")
    except NotOurs:
        raise
    except ValueError as problem:  # raised for the file, or by the library for its content
        decision_log.move_aside(path, problem)
    return ""


def merge(path: str, machine: str, new: Answers) -> None:
    """Adds answers to the file. Each replaces an older one for the same layers and size. Never fails."""
    if not new:
        return
    try:
        check_ours(path)  # before the lock file is created
        file_trust.make_folder(os.path.dirname(os.path.abspath(path)))
        with open(path + ".lock", "a") as lock:
            file_lock.take(lock.fileno(), lock.name)
            try:
                machines = _machines(path, machine)
                known = read(path, machine)
            except Damaged as problem:
                decision_log.move_aside(path, problem)
                machines, known = {}, []
            machines[machine] = latest([*known, *new])[-KEPT:]
            decision_log.replace(
                path, json.dumps({"sluice_kept_decisions": FORM, "machines": machines}, indent=1) + "\n"
            )
    except NotOurs as problem:
        _say(f"{problem.message}: the decisions of this run are not kept")
    except OSError as error:
        _say(f"{path} cannot be written ({error.strerror}): the decisions of this run are not kept")


def latest(answers: Iterable[dict[str, Any]]) -> Answers:
    """Returns the answers in order, with only the last one for the same layers and size."""
    found: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for answer in answers:
        found.pop(_key(answer), None)  # so that the answer becomes the newest
        found[_key(answer)] = answer
    return list(found.values())


def _key(answer: dict[str, Any]) -> tuple[str, int, bool]:
    """Returns (kind of layer, size in the tuner's steps of 2^(1/4) as in sluice_search_bucket, whether planned)."""
    size = math.floor(4 * math.log2(max(int(answer["rows"]), 1)) + 0.5)
    return answer["layer"], size, "restore_input" in answer


def _say(text: str) -> None:
    print(f"sluice: {text}", file=sys.stderr, flush=True)
