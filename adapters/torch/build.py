"""Compiles the adapter's C++ against the torch at hand.

    python -m sluice.adapters.torch.build [--out DIR] [--force]

torch promises no stable C++ ABI, so there is one shared object per minor version of torch: `_torch_2_13.so`, beside
this package or in the user's cache (SLUICE_CACHE_DIR, else XDG_CACHE_HOME/sluice). A stamp beside it says what it was
made from; when that no longer fits, it is made again. Several ranks may do so at once: the first compiles, the others
wait.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from ...errors import Foreign, NotFound, SluiceError

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = ("c10d_comm.cpp", "host_gemm.cpp", "accumulate.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")


def file_name() -> str:
    """Which shared object belongs to this torch."""
    major, minor = torch.__version__.split(".")[:2]
    return f"_torch_{major}_{minor}.so"


def include_dir() -> str:
    """Where `sluice/sluice.h` is: in the installed package, or in the checkout."""
    package = os.path.dirname(os.path.dirname(HERE))
    checkout = os.path.dirname(os.path.dirname(os.path.realpath(HERE)))
    for folder in (os.path.join(package, "include"), os.path.join(checkout, "capi", "include")):
        if os.path.isfile(os.path.join(folder, "sluice", "sluice.h")):
            return folder
    raise NotFound(f"the headers of Sluice are missing below {package}: reinstall the package")


def stamp() -> str:
    """Changes whenever the shared object has to be made again."""
    digest = hashlib.sha256()
    cxx11 = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    digest.update(f"{torch.__version__} {torch.version.git_version} {cxx11} {FLAGS}".encode())
    headers = (os.path.join(include_dir(), "sluice", name) for name in ("base.h", "comm.h", "context.h"))
    for path in (*(os.path.join(HERE, name) for name in SOURCES), *headers):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def cache_dir() -> str:
    named = os.environ.get("SLUICE_CACHE_DIR")
    if named:
        return named
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "sluice")


def _is_current(path: str, wanted: str) -> bool:
    try:
        with open(f"{path}.stamp") as file:
            return file.read() == wanted and os.path.exists(path)
    except OSError:
        return False


def ensure() -> str:
    """The path of a shared object that fits, compiled into the user's cache if the package holds none."""
    wanted = stamp()
    cached = os.path.join(cache_dir(), wanted[:16], file_name())
    for path in (os.path.join(HERE, file_name()), cached):
        if _is_current(path, wanted):
            return path
    make(cached)
    return cached


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One process at a time. The lock goes away with its process, so a killed builder leaves nothing behind."""
    with open(os.path.join(folder, ".build.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"sluice: {text}", file=sys.stderr, flush=True)


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise NotFound(
            f"no C++ compiler ({name}) to build the torch adapter for torch {torch.__version__}: install g++, or set "
            f"CXX, or copy {file_name()} and its .stamp from a machine with the same torch to {HERE}"
        )
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        text = f"{' '.join(command)}\n{done.stdout[-4000:]}"
        raise Foreign(f"the torch adapter does not compile:\n{text}")


def make(path: str, force: bool = False) -> None:
    """Compiles to `path`, unless another process has just done so."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    compiler = _compiler()
    with _locked(folder):
        wanted = stamp()
        if not force and _is_current(path, wanted):
            return
        began = time.monotonic()
        root = os.path.dirname(torch.__file__)
        includes = ["-I", include_dir()]
        for name in ("include", "include/torch/csrc/api/include"):
            includes += ["-isystem", os.path.join(root, name)]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = []
            for number, name in enumerate(SOURCES, 1):
                _say(f"compiling the adapter for torch {torch.__version__}: {name} ({number} of {len(SOURCES)})")
                objects.append(os.path.join(scratch, f"{name}.o"))
                _run([compiler, *FLAGS, abi, *includes, "-c", os.path.join(HERE, name), "-o", objects[-1]])
            linked = os.path.join(scratch, "linked.so")
            libraries = ["-L", os.path.join(root, "lib"), "-ltorch_cpu", "-lc10"]
            _run([compiler, "-shared", "-o", linked, *objects, *libraries])
            with open(os.path.join(scratch, "stamp"), "w") as file:
                file.write(wanted)
            # The stamp goes last: a reader that sees it sees its shared object.
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{path}.stamp")
            os.replace(linked, path)
            os.replace(os.path.join(scratch, "stamp"), f"{path}.stamp")
        _say(f"{path} is ready ({time.monotonic() - began:.1f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=HERE, help="folder of the shared object; by default the package's own")
    parser.add_argument("--force", action="store_true", help="even if it is current")
    options = parser.parse_args()
    try:
        make(os.path.join(os.path.abspath(options.out), file_name()), options.force)
    except SluiceError as error:
        sys.exit(f"sluice: {error}")
    except PermissionError as error:
        sys.exit(f"sluice: {error}: name another folder with --out")


if __name__ == "__main__":
    main()
