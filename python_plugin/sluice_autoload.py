# SPDX-License-Identifier: Apache-2.0
"""What `import torch` calls in every process (the `torch.backends` entry point): Sluice's own loader, or a word.

It lies beside the package. Were it in it, another `sluice` earlier on sys.path, be it the user's own script, would run
in its place, or make every `import torch` raise.
"""

from __future__ import annotations

import importlib.util
import os
import sys

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sluice", "__init__.py")


def load() -> None:
    """Runs `sluice.autoload`. Never raises, and imports no other package of this name."""
    try:
        found = _found()
        if found is None or os.path.realpath(found) != os.path.realpath(PACKAGE):
            _say(f"{found or 'something'} comes before {PACKAGE} on sys.path")
            return
        from sluice import autoload

        autoload.load()
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")


def _found() -> str | None:
    """The file that `import sluice` takes."""
    module = sys.modules.get("sluice")
    spec = importlib.util.find_spec("sluice") if module is None else None
    return getattr(module, "__file__", None) if spec is None else spec.origin


def _say(why: str) -> None:
    try:
        print(f"sluice: not loaded: {why}", file=sys.stderr, flush=True)
    except Exception:  # stderr may be closed
        return
