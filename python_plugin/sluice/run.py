# SPDX-License-Identifier: Apache-2.0
"""Runs a training script and guarantees that Sluice is loaded.

    python -m sluice.run train.py ...
    deepspeed --module sluice.run train.py ...        (torchrun -m sluice.run train.py ... likewise)
    python -m sluice.run [--require] [-m] SCRIPT_OR_MODULE ...

It replaces the autoloading of torch: for torch before 2.5, with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or if a run without
Sluice should fail. `"sluice": {"enabled": true}` in the config still switches Sluice on; `--require` is
SLUICE=require. DeepSpeed's launcher puts `--local_rank=N` before the script: it is passed on.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m sluice.run [--require] [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"
HELP = f"""{USAGE}

Runs a training script with Sluice loaded, or fails before the script starts.

  --require  everything that would not run on Sluice is an error (SLUICE=require)
  -m         what follows is a module, as of python -m

example:
  sluice run --require train.py --deepspeed_config ds_config.json

exit status: 0 or what the script exits with; 1 where Sluice does not load or there is nothing to run
"""


def split(arguments: list[str]) -> tuple[str, bool, list[str], bool]:
    """Returns (script, whether it is a module, its arguments, --require). ValueError says what is missing."""
    passed_on: list[str] = []
    require = module = False
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word.startswith(("--local_rank", "--local-rank")):
            passed_on.append(word)
            if "=" not in word:
                if not rest:
                    raise ValueError(f"{word} needs a number")
                passed_on.append(rest.pop(0))
        elif word == "--require":
            require = True
        elif word == "-m":
            module = True
            break
        else:
            raise ValueError(f"unknown option {word}")
    if not rest:
        raise ValueError("no script to run")
    return rest[0], module, passed_on + rest[1:], require


def main(arguments: list[str] | None = None) -> None:
    """Checks that the library loads, installs the hook, and runs the script as `__main__`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        sys.exit(0)
    try:
        script, is_module, rest, require = split(arguments)
    except ValueError as error:
        sys.exit(f"sluice.run: {error}\n{USAGE}")
    try:
        from sluice import _library

        _library.load()
    except Exception as error:
        sys.exit(f"sluice.run: the C library does not load, so {script} was not started: {error}")
    from sluice import autoload

    autoload.load()
    if autoload.problems:
        sys.exit(f"sluice.run: {script} was not started: {autoload.problems[0]}")
    if require:
        os.environ["SLUICE"] = "require"
    sys.argv = [script, *rest]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(script):
            sys.exit(f"sluice.run: there is no file {script} in {os.getcwd()}")
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
