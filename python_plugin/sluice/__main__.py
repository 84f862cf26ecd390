# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m sluice COMMAND`, which is also `sluice COMMAND`."""

from __future__ import annotations

import importlib
import os
import signal
import sys

USAGE = """usage: sluice COMMAND (or python -m sluice COMMAND)

  doctor             what is installed, what would be used, what a config would swap, what is wrong and what to do
  run SCRIPT ...     runs a training script with Sluice, or fails if Sluice does not load (as python -m sluice.run)
  plan               whether a model fits a machine, and the n and restore policy of each layer, with reasons;
                     --stages: which layer runs on which stage, and what is kept, recomputed or offloaded
  simulate           predicts weak and strong scaling to more ranks, on any machine that has a description;
                     --stages: a batch of a pipeline under every policy, its bubble and bytes;
                     --device: the calls and the modelled time of one step on a GPU, without a GPU
  routing DIR        joins expert loads that ranks recorded, for `simulate` and `plan`
  trace -- COMMAND   records COMMAND and reports the time of MoE layers, idle lanes, predictions and pictures
  merge              adds a LoRA adapter of PEFT to the weights of its checkpoint, one file at a time
  tune               measures this machine, and makes the decisions for a model before training
  version            the version of this package
"""
COMMANDS = {
    "doctor": "doctor",
    "plan": "planning.plan_command",
    "simulate": "planning.simulate_command",
    "routing": "planning.routing",
    "tune": "planning.tune_command",
    "trace": "tracing.command",
    "merge": "adapters.transformers.merge",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "run":  # the script handles its own broken pipes
        from sluice import run

        run.main(rest)
        return 0
    try:
        try:
            return _dispatch(command, rest)
        finally:
            sys.stdout.flush()  # an error of the flush at exit could not be caught
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _dispatch(command: str, rest: list[str]) -> int:
    if command in COMMANDS:
        return int(importlib.import_module(f"sluice.{COMMANDS[command]}").main(rest))
    if command in ("version", "--version"):
        import sluice

        print(sluice.__version__)
        return 0
    if command in ("", "-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if command else 2
    print(f"sluice: unknown command {command!r}\n{USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
