"""The helpers of this folder are imported by name; the switch of the machine must not decide what the tests see."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
for name in ("SLUICE", "SLUICE_OPTIONS"):
    os.environ.pop(name, None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
