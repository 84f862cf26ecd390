# SPDX-License-Identifier: Apache-2.0
"""Decides which skips are allowed on this machine: checks the conditions of skips.txt itself, without relying on the
tests."""

import ctypes
import fnmatch
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SO_ATTACH_FILTER = 26


def _text(path):
    with open(path) as file:
        return file.read()


def _is_linux(least):
    numbers = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
    return numbers >= [int(number) for number in least.split(".")]


def _version_is(name_and_pattern):
    name, pattern = name_and_pattern.split()
    try:
        return fnmatch.fnmatchcase(importlib.metadata.version(name), pattern)
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def _has_namespaces():
    """Returns whether a shaped link between two network namespaces can be made, as in integration_tests/net."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    cable = "ip link add a type veth peer name b && tc qdisc add dev a root tbf rate 1gbit burst 64kb latency 50ms"
    try:
        return subprocess.run([*unshare, "sh", "-c", cable], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _has_socket_filters():
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    with socket.socket() as own:
        try:
            own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError:
            return False
    return True


def _has_nvcc():
    found = subprocess.run(
        [os.path.join(ROOT, "third_party/bazel/found.sh")], capture_output=True, text=True, check=True
    )
    return "nvcc" in found.stdout or "nvfatbin" in found.stdout


def _has_stolen_time():
    return int(_text("/proc/stat").split("\n", 1)[0].split()[8]) > 0


WITH_A_WORD = {
    "command": shutil.which,
    "cores": lambda least: len(os.sched_getaffinity(0)) >= int(least),
    "environment": os.environ.get,
    "file": os.path.exists,
    "flag": lambda name: (
        f" {name} " in re.search(r"^flags\s*:(.*)$", _text("/proc/cpuinfo") + "\nflags:\n", re.MULTILINE)[1] + " "
    ),
    "Linux": _is_linux,
    "Python": lambda least: sys.version_info >= tuple(int(number) for number in least.split(".")),
    "version": _version_is,
}
ALONE = {
    "any machine": lambda: True,
    "gpu": lambda: os.path.exists("/dev/nvidiactl"),
    "namespaces": _has_namespaces,
    "nvcc": _has_nvcc,
    "root": lambda: os.geteuid() == 0,
    "socket filters": _has_socket_filters,
    "stolen time": _has_stolen_time,
}


def holds(condition, options):
    """Returns whether a condition holds on this machine in a run with these options."""
    if condition.startswith("no "):
        return not holds(condition.removeprefix("no "), options)
    if condition in ALONE:
        return bool(ALONE[condition]())
    kind, _, word = condition.partition(" ")
    if kind == "option":
        return any(fnmatch.fnmatchcase(option, word) for option in options)
    return bool(WITH_A_WORD[kind](word))


def read(path=os.path.join(HERE, "skips.txt")):
    """Returns (condition, test, reason) of each line."""
    lines = [line.split("#")[0].strip() for line in _text(path).split("\n")]
    return [tuple(word.strip() for word in line.split(" | ")) for line in lines if line]


def is_allowed(test, reason, options, lines):
    """Returns whether a line allows this skip here."""
    return any(
        fnmatch.fnmatchcase(test, which) and fnmatch.fnmatchcase(reason, why) and holds(condition, options)
        for condition, which, why in lines
    )
