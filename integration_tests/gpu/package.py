# SPDX-License-Identifier: Apache-2.0
"""Provides the `sluice` package for these scripts: staged around the library that `run` has built, or on a CPU without
such a build the installed one. Prints what is missing, with exit status 77."""

import contextlib
import fcntl
import importlib.util
import io
import os
import pathlib
import sys

SKIPPED = 77
ROOT = pathlib.Path(__file__).resolve().parents[2]


def skip(why):
    print(why)
    sys.exit(SKIPPED)


def ready(fake):
    """Makes torch and sluice importable, and returns the device."""
    if importlib.util.find_spec("torch") is None:
        skip("PyTorch is not installed")
    build = pathlib.Path(os.environ.get("SLUICE_GPU_BUILD", "."))
    is_built = (build / "libsluice.so.0").exists()
    if is_built or not fake:
        _stage(build)  # before torch, which loads an installed `sluice` with its other extensions
    import torch

    if not fake and not torch.cuda.is_available():
        skip(f"torch {torch.__version__} sees no CUDA device")
    try:
        import sluice.adapters.torch
    except ImportError as error:
        if is_built:
            raise
        skip(f"{error}: run .venv/bin/python python_plugin/packaging/install.py")
    if is_built and build.resolve() not in pathlib.Path(sluice.__file__).resolve().parents:
        sys.exit(f"sluice comes from {sluice.__file__}, and not from what was built in {build}")
    return torch.device("cpu") if fake else torch.device("cuda", torch.cuda.current_device())


def _stage(build):
    try:
        import cffi  # noqa: F401
    except ImportError:
        skip("cffi is not installed: carry its wheel")
    sys.path.insert(0, str(ROOT / "python_plugin" / "packaging"))
    import install

    top, stamp, staged = build / "package", (build / "built").read_text(), build / "staged"
    # Scripts run in parallel processes: the first one stages the package.
    with (build / "staged.lock").open("w") as lock, contextlib.redirect_stdout(io.StringIO()):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not staged.exists() or staged.read_text() != stamp:
            install.stage(str(top), [str(build / "libsluice.so.0")], "0")
            staged.write_text(stamp)
    sys.path.insert(0, str(top))
