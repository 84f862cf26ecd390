# SPDX-License-Identifier: Apache-2.0
"""Kills and stops ranks of a DeepSpeed job at random instants, restarts the job, and compares the losses.

    .venv/bin/python contrib/soak/soak.py [--minutes 5] [--seed N]

A job resumes from its last checkpoint; one of its ranks is killed, or stopped for a moment, or stopped for good, or
nothing happens. The soak fails if the other rank returns no status within the deadline, if it does not wait for a rank
that was stopped for a moment, or if a loss differs in any bit from an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "integration_tests" / "deepspeed"))

import rank_harness  # noqa: E402

WORLD = 2
WHOLE = "whole"  # as in cases_soak.py
STEPS = 120
SHORT_S = 1.0  # the longest stop that the other rank must tolerate
DEADLINE_S = 300.0  # for a rank's answer on a busy machine; the config section has 60 s, the host 90 s
EVENTS = {"kill": 55, "short stop": 25, "long stop": 10, "none": 10}
ENDS_THE_JOB = ("kill", "long stop")


class Broken(AssertionError):
    """Reports a violated property."""


class Job:
    """Runs one job repeatedly, with a random event in each run."""

    def __init__(self, folder: str, seed: int) -> None:
        self.folder, self.random = Path(folder), random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wanted: dict[tuple[int, str], str] = {}
        self.ranks: rank_harness.Ranks | None = None
        self.train_s = 5.0  # about the time from the beginning of training to the last loss
        self.errors: Counter[str] = Counter()

    def undisturbed(self) -> None:
        """Runs the job without events, and records the losses that all later runs must have."""
        with tempfile.TemporaryDirectory(prefix="sluice_soak_") as other:
            answers = self._train(other, Path(other) / "begun")
            began = max(path.stat().st_mtime for path in Path(other).glob("begun.*"))
            self.train_s = max(path.stat().st_mtime for path in Path(other).glob("loss-*")) - began
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise Broken(f"nobody was disturbed: {answer['error']['traceback']}")
            self.wanted.update({(rank, step): loss for step, loss in answer["result"]["losses"].items()})

    def _train(
        self, folder: str, begun: Path, dying: tuple[int, ...] = (), stopping: tuple[int, ...] = ()
    ) -> list[dict]:
        if self.ranks is None:
            self.ranks = rank_harness.Ranks(WORLD)
        arguments = {"folder": folder, "steps": STEPS, "begin_file": str(begun)}
        return self.ranks.try_run("cases_soak:train_on", DEADLINE_S, dying=dying, stopping=stopping, **arguments)

    def disturbed(self, number: int) -> None:
        what = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        victim = self.random.randrange(WORLD)
        begun = self.folder / f"begun{number}"
        after = self.random.uniform(0, self.train_s)
        if self.ranks is None:  # the victim's process ID is needed before the call
            self.ranks = rank_harness.Ranks(WORLD)
            self.ranks._start()
        pid = self.ranks.process_id(victim)
        is_over = threading.Event()

        def happen() -> None:
            """Waits until training begins, after seconds of set-up, and then causes the event."""
            while not is_over.is_set() and len(list(self.folder.glob(f"{begun.name}.*"))) < WORLD:
                time.sleep(0.005)
            is_over.wait(after if what != "none" else 0)
            if what == "kill":
                os.kill(pid, signal.SIGKILL)
            elif what == "long stop":  # until its job is ended
                os.kill(pid, signal.SIGSTOP)
            elif what == "short stop" and not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(0.01, SHORT_S))
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=happen)
        thread.start()
        try:
            answers = self._train(
                str(self.folder),
                begun,
                dying=(victim,) if what == "kill" else (),
                stopping=(victim,) if what == "long stop" else (),
            )
        except AssertionError as silent:
            raise Broken(f"run {number}, {what} of rank {victim} after {after:.2f} s: {silent}") from silent
        finally:
            is_over.set()
            thread.join()
        self._check(number, what, victim, answers)
        self.done[what] += 1
        if what in ENDS_THE_JOB or any("error" in answer for answer in answers):
            self.ranks.stop()
            self.ranks = None
        whole = self.folder / WHOLE
        if whole.exists() and whole.read_text() == f"step{STEPS}":
            whole.unlink()
            self.done["whole trainings"] += 1

    def _check(self, number: int, what: str, victim: int, answers: list[dict]) -> None:
        for answer in answers:
            if "error" in answer:
                self.errors[answer["error"]["type"]] += 1
                if what not in ENDS_THE_JOB:
                    raise Broken(f"run {number}, {what} of rank {victim}: {answer['error']['traceback']}")
        for path in self.folder.glob("loss-*-*"):
            _, rank, step = path.name.split("-")
            loss = path.read_text()
            if loss and loss != self.wanted[int(rank), step]:
                wanted = self.wanted[int(rank), step]
                raise Broken(f"run {number}, {what}: loss of rank {rank} in step {step} is {loss}, not {wanted}")
            self.done["losses"] += bool(loss)
            path.unlink()

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.stop()


def run(minutes: float, seed: int) -> str:
    """Runs the soak, and returns its summary in one line. Raises Broken."""
    with tempfile.TemporaryDirectory(prefix="sluice_soak_") as folder:
        job = Job(folder, seed)
        try:
            job.undisturbed()
            number, end = 0, time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                number += 1
                job.disturbed(number)
                print(f"soak: {number} runs, {max(0.0, end - time.monotonic()) / 60:.1f} minutes left", file=sys.stderr)
        finally:
            job.close()
    events = ", ".join(f"{job.done[what]} x {what}" for what in EVENTS)
    errors = ", ".join(f"{count} {name}" for name, count in job.errors.most_common()) or "none"
    return (
        f"soak: DeepSpeed, {WORLD} ranks, {number} runs ({events}), {job.done['losses']} losses of an undisturbed run, "
        f"{job.done['whole trainings']} trainings to their ends; errors of survivors: {errors}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="what happens when")
    options = parser.parse_args()
    print(f"soak: seed {options.seed}", flush=True)
    try:
        print(run(options.minutes, options.seed))
    except Broken as broken:
        sys.exit(f"soak: BROKEN: {broken}")
