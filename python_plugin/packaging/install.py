# SPDX-License-Identifier: Apache-2.0
"""Builds libsluice, stages the `sluice` package around it, makes a wheel and installs it into this Python.

    .venv/bin/python python_plugin/packaging/install.py [--force] [--wheel-dir DIR] [--no-install]

Nothing is done if no input has changed since the last install. A wheel in --wheel-dir ships torch adapters for the
torch of this Python and of each Python that --torch names. For the wheel installed here, the adapter is compiled next
to the package.
"""

import argparse
import base64
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "capi", "packaging"), os.path.join(ROOT, "capi", "bindings")]
import cdef  # noqa: E402
import declarations  # noqa: E402
import elf  # noqa: E402
import libraries  # noqa: E402
import restore_table  # noqa: E402
import tree  # noqa: E402
from libraries import INCLUDE, Failure  # noqa: E402

PACKAGE = ("python_plugin/sluice", "sluice")
ENTRY = "python_plugin/sluice_autoload.py"  # next to the package
SOURCE_SUFFIXES = (".py", ".pyi", ".typed", ".c", ".cc", ".cpp", ".h", ".json")
ADAPTER = os.path.join(sysconfig.get_paths()["purelib"], "sluice/adapters/torch")  # the installed adapter
CFFI = ">=1.15"  # the only dependency of the package
TORCH_ADAPTER = os.path.join(HERE, "torch_adapter.py")
SKIP_FOLDERS = {"test", "tests", "__pycache__"}


def say(text):
    print(f"install: {text}", flush=True)


def adapter_packages():
    """Yields (folder, package) of each adapter that is a Python package."""
    base = os.path.join(ROOT, "adapters")
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        if os.path.isfile(os.path.join(base, name, "__init__.py")):
            yield f"adapters/{name}", f"sluice/adapters/{name}"


def files_below(folder):
    """Yields paths relative to `folder`, in a fixed order."""
    top = os.path.join(ROOT, folder)
    for where, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in SKIP_FOLDERS)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(where, name), top)


def input_hash():
    """Returns a hash of all sources of the wheel, those of the library included, and of the machine's tools."""
    digest = hashlib.sha256(sys.version.encode())
    found = subprocess.run([os.path.join(ROOT, "third_party", "bazel", "found.sh")], check=True, capture_output=True)
    digest.update(found.stdout)
    folders = ["capi", "backend", "third_party/bazel", "python_plugin", "adapters"]
    paths = ["WORKSPACE", "BUILD", ".bazelrc"]
    for folder in folders:
        paths += [os.path.join(folder, name) for name in files_below(folder)]
    for path in paths:
        digest.update(path.encode() + b"\0")
        with open(os.path.join(ROOT, path), "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def build_libraries(folder):
    """Builds the libraries and the program, and puts them into `folder`, stripped."""
    began = time.monotonic()
    say("building the library with Bazel (minutes the first time)")
    stripped = []
    for path in libraries.build(libraries.DRY_STEP):
        stripped.append(os.path.join(folder, os.path.basename(path)))
        libraries.strip(path, stripped[-1])
    say(f"built {', '.join(map(os.path.basename, stripped))} in {time.monotonic() - began:.1f} s")
    return stripped


def platform_tag(paths):
    """Returns the wheel's platform tag, by which pip refuses it on a machine with an older C library."""
    return "py3-none-manylinux_{}_{}_x86_64".format(*elf.glibc(paths))


def stage(top, paths, version):
    """Copies the package to `top` in its installed layout."""
    for folder, package in [PACKAGE, *adapter_packages()]:
        for name in files_below(folder):
            if name.endswith(SOURCE_SUFFIXES):
                tree.copy(os.path.join(ROOT, folder, name), os.path.join(top, package, name))
    tree.copy(os.path.join(ROOT, ENTRY), os.path.join(top, os.path.basename(ENTRY)))
    about = '"""Adapters of host frameworks; each is imported only where its host is."""\n'
    tree.write(os.path.join(top, "sluice/adapters/__init__.py"), about)
    for path in paths:
        tree.copy(path, os.path.join(top, "sluice/lib", os.path.basename(path)))
    for name in declarations.header_files(INCLUDE):
        tree.copy(os.path.join(INCLUDE, name), os.path.join(top, "sluice/include", name))
    cdef.emit(INCLUDE, "sluice._sluice_abi", os.path.join(top, "sluice/_sluice_abi.py"))
    restore_table.emit(paths[0], os.path.join(top, "sluice/_restore_table.py"))
    about = '"""Written by the packaging; the C headers are the source."""\n\n'
    tree.write(os.path.join(top, "sluice/_version.py"), f'{about}__version__ = "{version}"\n')


def ship_adapters(top, pythons, fresh):
    """Puts the adapter for the torch of each Python into the staged package, stripped."""
    for python in pythons:
        with tempfile.TemporaryDirectory() as scratch:
            installed = [] if fresh else glob.glob(os.path.join(ADAPTER, "_torch_*.so"))
            ship_adapter(top, [python, TORCH_ADAPTER, *installed], scratch if fresh else None)


def ship_adapter(top, command, cache=None):
    """Runs torch_adapter.py by `command`, and returns the path of the adapter in the staged package. Compiled adapters
    are cached in `cache`, else in the user's cache folder.
    """
    began = time.monotonic()
    environment = dict(os.environ, PYTHONPATH=top, PYTHONDONTWRITEBYTECODE="1")
    if cache is not None:
        environment["SLUICE_CACHE_DIR"] = cache
    done = subprocess.run(command, env=environment, cwd=top, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure(f"there is no adapter of {' '.join(command[:1] + command[2:4])}: see above")
    found = json.loads(done.stdout.splitlines()[-1])
    libraries.strip(found["path"], found["shipped"])
    with open(found["shipped"], "rb") as file:
        stamp = {**found["stamp"], "sha256": hashlib.sha256(file.read()).hexdigest()}
    tree.write(f"{found['shipped']}.stamp", json.dumps(stamp, indent=1) + "\n")
    say(f"{os.path.basename(found['shipped'])} ready in {time.monotonic() - began:.1f} s")
    return found["shipped"]


def binaries(top):
    return [path for path in glob.glob(os.path.join(top, "**"), recursive=True) if is_elf(path)]


def is_elf(path):
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def metadata(version):
    return (
        f"Metadata-Version: 2.1\nName: sluice\nVersion: {version}\n"
        "Summary: Expert-parallel mixture-of-experts engine that host frameworks swap in\n"
        f"License: Apache-2.0\nRequires-Python: >=3.9\nRequires-Dist: cffi{CFFI}\n"
        'Provides-Extra: png\nRequires-Dist: resvg-py>=0.2; extra == "png"\n'
    )


def make_wheel(top, version, tag, wheel_dir):
    """Writes the wheel, which is a zip of the staged tree and four small files."""
    info = f"sluice-{version}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: sluice-packaging\nRoot-Is-Purelib: false\nTag: {tag}\n"
    entry_points = "[console_scripts]\nsluice = sluice.__main__:main\n\n"
    entry_points += "[torch.backends]\nsluice = sluice_autoload:load\n"
    for name, text in (("METADATA", metadata(version)), ("WHEEL", wheel), ("entry_points.txt", entry_points)):
        tree.write(os.path.join(top, info, name), text)
    tree.copy(os.path.join(ROOT, "LICENSE"), os.path.join(top, info, "LICENSE"))

    os.makedirs(wheel_dir, exist_ok=True)
    path = os.path.join(wheel_dir, f"sluice-{version}-{tag}.whl")
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for where, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                full = os.path.join(where, name)
                inside = os.path.relpath(full, top)
                with open(full, "rb") as file:
                    data = file.read()
                entry = zipfile.ZipInfo(inside)  # fixed date: equal inputs give equal wheels
                entry.compress_type = zipfile.ZIP_DEFLATED
                # pip keeps the executable bit only of an entry that is marked as a regular file.
                entry.external_attr = (stat.S_IFREG | (0o755 if is_elf(full) else 0o644)) << 16
                archive.writestr(entry, data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append(f"{inside},sha256={digest},{len(data)}\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "".join(record) + f"{info}/RECORD,,\n")
    return path


def make(wheel_dir, pythons=(), fresh=False, ship=None):
    """Makes a wheel in `wheel_dir`, with adapters for the torches of these Pythons, and returns its path.

    fresh  compile the adapters even if compiled ones exist
    ship   called with the staged package, to put further adapters into it
    """
    with tempfile.TemporaryDirectory() as scratch:
        top = os.path.join(scratch, "stage")
        stage(top, build_libraries(os.path.join(scratch, "lib")), libraries.version())
        ship_adapters(top, pythons, fresh)
        if ship is not None:
            ship(top)
        return make_wheel(top, libraries.version(), platform_tag(binaries(top)), wheel_dir)


def install(wheel):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--force-reinstall", "--no-index", wheel]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise Failure(f"pip could not install {os.path.basename(wheel)}: {done.stdout.strip().splitlines()[-1:]}")


def build_torch_adapter():
    """Compiles the one C++ file against the installed torch; the builder reuses a compiled adapter that is valid."""
    if not os.path.isfile(os.path.join(ROOT, "adapters/torch/build.py")):
        return
    if importlib.util.find_spec("torch") is None:
        say("torch is not installed here: its adapter is compiled on first use")
        return
    began = time.monotonic()
    # Run it in another folder, so that `sluice` is never imported from the checkout.
    done = subprocess.run(
        [sys.executable, "-m", "sluice.adapters.torch.build"], cwd=os.path.dirname(sys.executable), text=True
    )
    if done.returncode != 0:
        raise Failure("the torch adapter did not compile: run `.venv/bin/python -m sluice.adapters.torch.build`")
    say(f"torch adapter ready in {time.monotonic() - began:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="even if nothing changed")
    parser.add_argument("--wheel-dir", help="keep the wheel here")
    parser.add_argument(
        "--torch", action="append", default=[], metavar="PYTHON", help="ship an adapter for its torch too"
    )
    parser.add_argument("--no-torch", action="store_true", help="ship no adapter for this Python's torch")
    parser.add_argument("--no-install", action="store_true", help="make the wheel only")
    options = parser.parse_args()
    began = time.monotonic()

    pythons = list(options.torch)
    if options.wheel_dir and not options.no_torch and importlib.util.find_spec("torch") is not None:
        pythons.insert(0, sys.executable)
    if sys.prefix == sys.base_prefix and not options.no_install:
        raise Failure("this is the machine's own Python: run it with .venv/bin/python")
    if not options.no_install:
        lock = open(os.path.join(sys.prefix, ".sluice-package.lock"), "w")  # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX)
    stamp_path = os.path.join(sys.prefix, ".sluice-package.json")
    now = {"inputs": input_hash()}
    if not (options.force or options.wheel_dir or options.no_install) and os.path.exists(stamp_path):
        with open(stamp_path) as file:
            unchanged = json.load(file) == now
        if unchanged and importlib.util.find_spec("sluice") is not None:
            say(f"nothing changed, sluice is installed ({time.monotonic() - began:.1f} s)")
            return
    if os.path.exists(stamp_path):
        os.remove(stamp_path)

    version = libraries.version()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = make(options.wheel_dir or scratch, pythons, options.force)
        if not options.no_install:
            install(wheel)
    if not options.no_install:
        build_torch_adapter()
        with open(stamp_path, "w") as file:
            json.dump(now, file)
        say(f"sluice {version} installed in .venv in {time.monotonic() - began:.1f} s")
    else:
        say(f"made {os.path.basename(wheel)} in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except (Failure, RuntimeError) as error:
        sys.exit(f"install: FAILED: {error}")
