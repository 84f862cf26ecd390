# SPDX-License-Identifier: Apache-2.0
"""Runs Sluice's loader in every process that imports torch (entry point `torch.backends`), or prints why it does not.

It is outside of the package. Inside it, another `sluice` earlier on sys.path, for example a script of the user, would
run instead, or make every `import torch` raise.
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
    """Returns the file that `import sluice` loads."""
    module = sys.modules.get("sluice")
    spec = importlib.util.find_spec("sluice") if module is None else None
    return getattr(module, "__file__", None) if spec is None else spec.origin


def _say(why: str) -> None:
    try:
        print(f"sluice: not loaded: {why}", file=sys.stderr, flush=True)
    except Exception:  # stderr may be closed
        return
