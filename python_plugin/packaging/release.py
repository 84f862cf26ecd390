# SPDX-License-Identifier: Apache-2.0
"""Makes all files of a release in one folder; runs of one commit give the same bits.

    .venv/bin/python python_plugin/packaging/release.py [--out DIR] [--torch VERSIONS] [--only NAMES] [--url ADDRESS]

It needs the packages that `third_party/setup/setup.sh test` installs. An interrupted run leaves its finished files in
DIR.COMMIT.part, and the next run of the same commit reuses them. RELEASING.md says what to check and how to publish.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "capi", "packaging"), os.path.join(ROOT, "capi", "bindings")]
import archive  # noqa: E402
import generate  # noqa: E402
import install  # noqa: E402
import libraries  # noqa: E402
import man_pages  # noqa: E402
import manual  # noqa: E402
import recipes  # noqa: E402
import sbom  # noqa: E402
import torch_wheels  # noqa: E402
import tree  # noqa: E402
from libraries import Failure  # noqa: E402

import backend  # noqa: E402

# The wheel ships adapters for the newest patch of the last four releases of torch.
TORCH = ("2.14.1", "2.13.0", "2.12.1", "2.11.0")


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{ROOT} is not a git checkout, and a release is made from a commit: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def clean_commit() -> str:
    changed = git("status", "--porcelain").splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise Failure(f"{len(changed)} files differ from the commit ({names}): commit, stash or remove them first")
    return git("rev-parse", "HEAD")


def check_out(out: str) -> None:
    if os.path.exists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise Failure(f"{out} exists and is not empty: remove it, or name another folder with --out")


def _packed(folder: str, name: str, lay_out: Callable[[str], object]) -> None:
    with tempfile.TemporaryDirectory() as top:
        lay_out(top)
        archive.write(os.path.join(folder, f"{name}.tar.gz"), top, name, archive.source_date())


def make_source(folder: str) -> None:
    backend.build_sdist(folder)


def make_bindings(folder: str) -> None:
    _packed(folder, f"sluice-{libraries.version()}-bindings", generate.write)


def make_manual(folder: str) -> None:
    def lay_out(top: str) -> None:
        manual.write(top)
        man_pages.write(os.path.join(top, "man3"), archive.source_date(), is_packed=False)

    _packed(folder, f"sluice-{libraries.version()}-manual", lay_out)


def _make_py(folder: str, *options: str) -> None:
    command = [sys.executable, os.path.join(ROOT, "capi", "packaging", "make.py"), "--out", folder, *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
        raise Failure(f"{' '.join(command[1:])} failed: see above")


def make_archive(folder: str) -> None:
    _make_py(folder)


def make_recipes(folder: str, work: str, url: str) -> None:
    name = f"sluice-{libraries.version()}-linux-x86_64.tar.gz"
    path = os.path.join(work, "archive", name)
    _packed(
        folder, f"sluice-{libraries.version()}-recipes", lambda top: recipes.write(top, path, url, libraries.version())
    )


def make_debs(folder: str) -> None:
    _make_py(folder, "--deb")


def make_wheel(folder: str, work: str, versions: list[str]) -> None:
    """Makes the wheel. Downloads and compiled adapters stay in `work`: an interrupted run loses at most one object."""

    def ship(top: str) -> None:
        for version, torch in zip(versions, fetched(work, versions)):
            abi = torch_wheels.cxx11_abi(torch)
            command = [sys.executable, install.TORCH_ADAPTER, "--unpacked", torch, str(abi)]
            adapter = install.ship_adapter(top, command, os.path.join(work, "adapters"))
            absent = torch_wheels.missing(adapter, torch)
            if absent:
                raise Failure(f"the adapter for torch {version} needs what that torch lacks: {', '.join(absent[:5])}")
            built = torch_wheels.about(torch)
            say(f"  torch {built['version']}: C++11 ABI {abi}, its libraries have all symbols of the adapter")

    install.make(folder, ship=ship)


def fetched(work: str, versions: list[str]) -> list[str]:
    return [torch_wheels.fetch(version, os.path.join(work, "torch")) for version in versions]


def finished(work: str, name: str, make: Callable[[str], None]) -> list[str]:
    """Returns the paths of an artifact's files, and makes them unless an earlier run has finished them."""
    folder, began = os.path.join(work, name), time.monotonic()
    is_new = not os.path.isdir(folder)
    if is_new:
        part = f"{folder}.part"
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(part)
        make(part)
        os.rename(part, folder)
    paths = [os.path.join(folder, file) for file in sorted(os.listdir(folder))]
    how = f"{time.monotonic() - began:.1f} s" if is_new else "by an earlier run"
    say(f"{name}: {', '.join(map(os.path.basename, paths))} ({how})")
    return paths


def sums(paths: list[str]) -> str:
    """Returns the checksums in the format of sha256sum --check."""
    return "".join(f"{sbom.sha256(path)}  {os.path.basename(path)}\n" for path in sorted(paths, key=os.path.basename))


def work_folder(out: str, commit: str) -> str:
    """Returns the folder in which a run keeps its finished files."""
    return f"{out}.{commit[:12]}.part"


@contextlib.contextmanager
def held(work: str) -> Iterator[None]:
    """Holds a lock, so that one run works at a time. The end of the process releases it."""
    os.makedirs(work, exist_ok=True)
    with open(os.path.join(work, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another run is making {work}: wait for it, or name another folder with --out") from None
        yield


def release(out: str, versions: list[str], only: list[str] | None, url: str | None = None) -> None:
    commit = clean_commit()
    check_out(out)
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct")
    work = work_folder(out, commit)
    with held(work):
        make_all(out, work, commit, versions, only, url)


def make_all(out: str, work: str, commit: str, versions: list[str], only: list[str] | None, url: str | None) -> None:
    makers = {
        "source": make_source,
        "bindings": make_bindings,
        "manual": make_manual,
        "archive": make_archive,
        "debs": make_debs,
        "wheel": lambda folder: make_wheel(folder, work, versions),
    }
    if url is not None:
        makers["recipes"] = lambda folder: make_recipes(folder, work, url)
    if url is None and "recipes" in (only or ()):
        raise Failure("--only: recipes name the address of the archive: give it with --url")
    unknown = sorted(set(only or ()) - set(makers))
    if unknown:
        raise Failure(f"--only: there is no {', '.join(unknown)}: choose among {', '.join(makers)}")
    wanted = [name for name in makers if only is None or name in only]
    if "recipes" in wanted and "archive" not in wanted:
        raise Failure("--only: recipes contain the checksum of the archive: name archive too")
    if "wheel" in wanted:
        fetched(work, versions)  # before the long steps, as the list may name a release that does not exist
        say(f"torch: {', '.join(versions)}")
    paths = []
    for name in wanted:
        folder = f"wheel-{'-'.join(versions)}" if name == "wheel" else name
        if name == "recipes":  # an earlier run may have had another address
            shutil.rmtree(os.path.join(work, name), ignore_errors=True)
        paths += finished(work, folder, makers[name])
    torches = [torch_wheels.about(path) for path in (fetched(work, versions) if "wheel" in wanted else [])]
    ready = os.path.join(work, "ready")
    shutil.rmtree(ready, ignore_errors=True)
    os.makedirs(ready)
    for path in paths:
        shutil.copyfile(path, os.path.join(ready, os.path.basename(path)))
    bill = os.path.join(ready, f"sluice-{libraries.version()}.cdx.json")
    seconds = int(os.environ["SOURCE_DATE_EPOCH"])
    tree.write(bill, sbom.text(paths, torches, libraries.version(), commit, seconds))
    text = sums([*paths, bill])
    tree.write(os.path.join(ready, "SHA256SUMS"), text)
    clean_commit()  # a file may have changed while the artifacts were made
    os.makedirs(os.path.dirname(out), exist_ok=True)
    os.replace(ready, out)
    shutil.rmtree(work)
    say(f"{out}: {len(text.splitlines())} files of commit {commit[:12]}, and SHA256SUMS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.path.join(ROOT, "dist", f"release-{libraries.version()}")
    parser.add_argument("--out", default=default, help=f"the folder ({os.path.relpath(default, ROOT)})")
    parser.add_argument("--torch", default=",".join(TORCH), metavar="VERSIONS", help="of torch (%(default)s)")
    parser.add_argument("--only", metavar="NAMES", help="source,bindings,manual,archive,debs,wheel,recipes")
    parser.add_argument(
        "--url", metavar="ADDRESS", help="of the folder of the release: adds recipes for conda and Spack"
    )
    options = parser.parse_args()
    versions = [version for version in options.torch.split(",") if version]
    only = options.only.split(",") if options.only else None
    release(os.path.abspath(options.out), versions, only, options.url)


if __name__ == "__main__":
    try:
        main()
    except (Failure, RuntimeError) as error:
        sys.exit(f"release: FAILED: {error}")
