# SPDX-License-Identifier: Apache-2.0
"""Runs the README's two commands in their natural order in a Debian that has nothing yet.

    third_party/test/bare_root.py [--root DIR] [COMMAND...]      (as root; default: ./quickstart, then ./test)

debootstrap makes the root from this machine's own mirror, with this machine's settings of apt and pip. The committed
state of this checkout is cloned into it. The commands run there one after the other in namespaces of their own: mounts
and processes, Bazel's server among them, end with the last command, whatever fails. --root keeps the root in DIR, and
uses the one that is there; without it the root is removed. Needs some 25 GB.

A line for each command says how it ended; the last is `bare root: N passed, N failed`. Exit 77: it was skipped.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NEEDED_BYTES = 25_000_000_000
SKIPPED = 77
# Variables of the caller that are kept: sources of packages, proxies and certificates.
KEPT = re.compile(r"PIP_\w+|\w+_proxy|\w+_PROXY|SSL_CERT_FILE|\w+_CA_BUNDLE|CARGO_HTTP_CAINFO|GIT_SSL_CAINFO")
APT = ("apt.conf.d", "auth.conf.d", "keyrings", "preferences.d", "sources.list", "sources.list.d", "trusted.gpg.d")

# pivot_root is used because user namespaces cannot be made in a chroot. $1: the root; further folders are mounted
# read-only at their own paths; commands follow after "--".
INSIDE = r"""
set -eu
root=$1
shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
  mkdir -p "$root$1"
  mount -o bind,ro "$1" "$root$1"
  shift
done
shift
mkdir -p "$root/.outside"
cd "$root"
pivot_root . .outside
cd /
umount -l /.outside
rmdir /.outside
cd /sluice
passed=0 failed=0
for command in "$@"; do
  printf '\nbare root: %s ...\n' "$command"
  began=$SECONDS rc=0
  bash -c "$command" </dev/null || rc=$?
  passed=$((passed + (rc == 0))) failed=$((failed + (rc != 0))) outcome=passed
  ((rc == 0)) || outcome="FAILED (exit $rc)"
  printf '\nbare root: %s: %s in %d s\n' "$command" "$outcome" $((SECONDS - began))
done
printf 'bare root: %d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
"""


def say(text):
    print(f"bare root: {text}", flush=True)


def run(*command):
    """Runs a command and returns its output; its errors are printed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def mirror():
    """Returns (name of this Debian, the address of this machine's mirror)."""
    with open("/etc/os-release") as file:
        name = re.search(r"^VERSION_CODENAME=(\w+)", file.read(), re.MULTILINE)[1]
    for line in run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)").splitlines():
        address, _, release = line.partition(" ")
        if release == name:
            return name, address
    sys.exit(f"bare root: FAILED: no source of apt has the release {name}: look into /etc/apt, run apt-get update")


def settings_of_pip():
    """Returns pip's settings on this machine as environment variables; existing variables win."""
    found = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section != ":env:":
            found["PIP_" + name.upper().replace("-", "_")] = ast.literal_eval(value)
    return found


def bring(environment, root):
    """Finds paths in the values, and returns (the environment for the root, folders to be mounted there).

    Files are copied to a separate folder, which no package overwrites. For an index, which is a file:// address, the
    parent folder is mounted, too, as links lead there.
    """
    folders, moved = set(), dict(environment)
    for word in sorted({word for value in environment.values() for word in value.split()}):
        path = word.removeprefix("file://").rstrip("/")
        if os.path.isfile(path) and os.path.isabs(path):
            copy(path, f"{root}/outside")
            moved = {name: re.sub(rf"(?<!\S){re.escape(path)}(?!\S)", f"/outside{path}", moved[name]) for name in moved}
        elif os.path.isdir(path) and os.path.isabs(path):
            folders.add(os.path.dirname(path) if word.startswith("file://") else path)
    return moved, sorted(folders)


def copy(path, root):
    """Copies a file or folder of this machine to the same path in the root."""
    to = root + path
    os.makedirs(os.path.dirname(to), exist_ok=True)
    if os.path.isdir(path):
        shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, to)


def make(root):
    """Makes a minimal Debian with this machine's sources of packages."""
    os.makedirs(root, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        missing = f"{free / 1e9:.0f} GB are free below {root}, {NEEDED_BYTES / 1e9:.0f} are needed"
        sys.exit(f"bare root: FAILED: {missing}: name another folder with --root")
    if shutil.which("debootstrap") is None:
        say("apt-get install debootstrap ...")
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "debootstrap"], check=True)
    name, address = mirror()
    say(f"debootstrap of {name} into {root} ...")
    subprocess.run(["debootstrap", "--variant=minbase", name, root, address], check=True)
    os.remove(f"{root}/etc/apt/sources.list")
    for path in (*(f"/etc/apt/{name}" for name in APT), "/usr/share/keyrings", "/usr/local/share/ca-certificates"):
        if os.path.exists(path):
            copy(path, root)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", metavar="DIR", help="make the root there and keep it, or use the one that is there")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", default=["./quickstart", "./test"])
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say("skipped: only root on a Debian can make one")
        sys.exit(SKIPPED)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    with tempfile.TemporaryDirectory(prefix="sluice_bare_root_") as scratch:
        root = os.path.abspath(options.root or scratch)
        if not os.path.exists(f"{root}/etc/apt"):
            make(root)
        environment = settings_of_pip() | {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        environment, folders = bring(environment, root)
        for path in ("/etc/resolv.conf", "/etc/hosts"):
            copy(path, root)
        if not os.path.exists(f"{root}/sluice"):
            subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, f"{root}/sluice"], check=True)
        environment |= {"HOME": "/root", "LANG": "C.UTF-8", "PATH": os.defpath + ":/usr/sbin:/sbin"}
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", INSIDE, "bare_root", root]
        done = subprocess.run([*command, *folders, "--", *options.commands], env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
