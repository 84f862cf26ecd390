# SPDX-License-Identifier: Apache-2.0
"""Compiles the adapter's C++ against the installed torch.

    python -m sluice.adapters.torch.build [--out DIR] [--force]

torch promises no stable C++ ABI, so there is one shared object per minor version of torch: `_torch_2_13.so`, in
this package or in the user's cache (SLUICE_CACHE_DIR, else XDG_CACHE_HOME/sluice). A stamp next to it has its sources
and its platform (`stamps.py`). If the stamp no longer fits, or other users could have changed the object, it is built
again. Several ranks may build at once: the first compiles, the others wait.

A wheel may contain shared objects for releases of torch (`shipped/_torch_2_13_0.so`). Such an object is preferred, and
needs no compiler: it fits every build of that release, with any Python.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from ... import cache_folder, file_lock, file_trust
from ...errors import External, NotFound, SluiceError
from . import stamps

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = ("c10d_comm.cpp", "host_gemm.cpp", "accumulate.cpp", "gradient_pool.cpp")
# The last two flags keep this machine's folders out of assert messages, so that every machine builds the same bits.
FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden"),
    *("-ffile-prefix-map={sluice}=sluice", "-ffile-prefix-map={torch}=torch"),
)


def file_name() -> str:
    """Returns the name of the shared object for this torch."""
    major, minor = torch.__version__.split(".")[:2]
    return f"_torch_{major}_{minor}.so"


def shipped_path() -> str:
    """Returns the path at which a wheel may have the shared object for this release of torch."""
    release = torch.__version__.partition("+")[0]
    return os.path.join(HERE, "shipped", f"_torch_{release.replace('.', '_')}.so")


def include_dir() -> str:
    """Returns the folder that has `sluice/sluice.h`: in the installed package, or in the checkout."""
    package = os.path.dirname(os.path.dirname(HERE))
    checkout = os.path.dirname(os.path.dirname(os.path.realpath(HERE)))
    for folder in (os.path.join(package, "include"), os.path.join(checkout, "capi", "include")):
        if os.path.isfile(os.path.join(folder, "sluice", "sluice.h")):
            return folder
    raise NotFound(f"the headers of Sluice are missing below {package}: reinstall the package")


def compiler() -> str | None:
    """Returns the C++ compiler that would be used; None: there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def wanted() -> stamps.Wanted:
    """Returns the stamp that a shared object must have."""
    headers = (os.path.join(include_dir(), "sluice", name) for name in ("base.h", "comm.h", "context.h"))
    sources = (os.path.join(HERE, name) for name in SOURCES)
    return stamps.wanted((*sources, *headers), FLAGS, compiler())


def _cached(fitting: stamps.Wanted) -> str:
    """Returns the path in the cache. Platforms that share a home folder have separate folders in it."""
    return os.path.join(cache_folder.for_code(), stamps.short(fitting), file_name())


def _find_cached(fitting: stamps.Wanted) -> tuple[str | None, list[str]]:
    """Finds a fitting object in the cache, and why others do not fit. Without a compiler here, any compiler's fits."""
    places = [_cached(fitting)]
    if fitting["compiler"] is None:
        places = sorted(glob.glob(os.path.join(glob.escape(cache_folder.for_code()), "*", file_name())))
    reasons = []
    for path in places:
        try:
            file_trust.check_folder(os.path.dirname(path))
            reason = stamps.why_not(path, fitting)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        if reason is None:
            return path, reasons
        reasons += [reason] if reason else []
    return None, reasons


def _owners(path: str) -> tuple[int, ...]:
    """Returns users that are trusted like this one: the package's owner could change the package itself."""
    return (os.stat(__file__).st_uid,) if os.path.commonpath((path, HERE)) == HERE else ()


def find() -> tuple[str | None, list[str]]:
    """Finds a shared object that fits and that no other user could have changed, and why others are rejected."""
    fitting, reasons = wanted(), []
    in_package = os.path.join(HERE, file_name())
    for path, needs in ((shipped_path(), stamps.for_any_build(fitting)), (in_package, fitting)):
        reason = stamps.why_not(path, needs, _owners(path))
        if reason is None:
            return path, []
        reasons += [reason] if reason else []
    path, others = _find_cached(fitting)
    return path, reasons + others


def check_cache(may_lack: bool = True) -> None:
    """Raises NotFound, with what to do, if code must not be loaded from the cache."""
    folder = os.path.dirname(_cached(wanted()))
    try:
        if not may_lack:
            file_trust.make_folder(folder)
        file_trust.check_folder(folder, may_lack)
    except file_trust.NotOurs as error:
        raise NotFound(f"no code is loaded from {folder}: {error.filename}: {error.strerror}") from error
    except OSError as error:
        raise NotFound(
            f"the torch adapter cannot be kept in {folder} ({error.filename}: {error.strerror}): set "
            f"{cache_folder.VARIABLE} to a folder that only you can write"
        ) from error


def ensure() -> str:
    """Returns the path of a shared object that fits, compiled into the user's cache if the package holds none."""
    path, reasons = find()
    if path is not None:
        return path
    for reason in reasons:
        _say(reason)
    check_cache(may_lack=False)
    make(_cached(wanted()))
    path, reasons = find()
    if path is None:
        raise NotFound(f"the torch adapter that was just compiled cannot be used: {'; '.join(reasons)}")
    return path


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Allows one process at a time. The lock ends with its process, so a killed builder leaves no lock.

    If locks do not work, two processes may build at once. If a stamp then belongs to the other's object, the object
    is built again.
    """
    path = os.path.join(folder, ".build.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        file_lock.take(handle, path)
        yield
    finally:
        os.close(handle)


def _say(text: str) -> None:
    print(f"sluice: {text}", file=sys.stderr, flush=True)


def _need_compiler() -> str:
    found = compiler()
    if found is None:
        name = os.environ.get("CXX", "g++")
        raise NotFound(
            f"no C++ compiler ({name}) to build the torch adapter for torch {torch.__version__}: install g++, or set "
            f"CXX, or copy {file_name()} and its .stamp from a machine with the same torch, Python and C library to "
            f"{HERE}"
        )
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        text = f"{' '.join(command)}\n{done.stdout[-4000:]}"
        raise External(f"the torch adapter does not compile:\n{text}")


def _take(kept: str, path: str) -> bool:
    """Copies a kept object; False if there is none. If locks do not work, another builder may remove the kept one."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(kept, path)
        return True
    return False


def _keep(path: str, folder: str) -> None:
    with contextlib.suppress(OSError):  # no room for a copy: the next build compiles it again
        os.makedirs(folder, mode=0o700, exist_ok=True)
        part = f"{os.path.join(folder, os.path.basename(path))}.{os.getpid()}"
        shutil.copyfile(path, part)
        os.replace(part, part.rpartition(".")[0])


def make(path: str, force: bool = False) -> None:
    """Compiles to `path`, unless another process has just done so."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    program = _need_compiler()
    with _locked(folder):
        fitting = wanted()
        if not force and stamps.why_not(path, fitting, _owners(path)) is None:
            return
        began = time.monotonic()
        root = os.path.dirname(torch.__file__)
        includes = ["-I", include_dir()]
        for name in ("include", "include/torch/csrc/api/include"):
            includes += ["-isystem", os.path.join(root, name)]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        flags = [flag.format(sluice=HERE, torch=root) for flag in FLAGS]
        kept = os.path.join(folder, f".objects-{stamps.short(fitting)}")  # finished by an interrupted build
        if force:
            shutil.rmtree(kept, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = []
            for number, name in enumerate(SOURCES, 1):
                objects.append(os.path.join(scratch, f"{name}.o"))
                if _take(os.path.join(kept, f"{name}.o"), objects[-1]):
                    continue
                _say(f"compiling the adapter for torch {torch.__version__}: {name} ({number} of {len(SOURCES)})")
                _run([program, *flags, abi, *includes, "-c", os.path.join(HERE, name), "-o", objects[-1]])
                _keep(objects[-1], kept)
            # Removed here: an object torn by a power failure would make every later link fail too.
            shutil.rmtree(kept, ignore_errors=True)
            linked = os.path.join(scratch, "linked.so")
            libraries = ["-L", os.path.join(root, "lib"), "-ltorch_cpu", "-lc10"]
            _run([program, "-shared", "-o", linked, *objects, *libraries])
            stamps.write(linked, os.path.join(scratch, "stamp"), fitting)
            # The stamp is moved last, so that a reader that sees the stamp also sees its shared object.
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
