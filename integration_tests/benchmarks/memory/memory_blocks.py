"""Which blocks are alive at the peak of a log of allocations, and who asked for them.

A site is a few callers, from the nearest to malloc outwards, allocators left out: enough to tell a saved tensor from a
slot, a library's scratch and a socket's buffer.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

CALLERS = 4
# Of allocators, of torch's dispatcher, of the interpreter, or without a name.
PASSED_THROUGH = re.compile(r"alloc|memalign|[Ee]mpty|Storage|std::|redispatch|^_?Py|^(?!libsluice)\S+\.so\S*\+0x")
OWN_SYMBOLS = re.compile(r"libsluice")  # not all of them exported: their debug information names the rest


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_size_t),
    )


def at_peak(events: np.ndarray, delta: np.ndarray) -> list[int]:
    """Return the events whose blocks are alive when most bytes are; their sizes add up to that peak."""
    owner: dict[int, int] = {}
    for index, (address, size) in enumerate(events[: int(np.cumsum(delta).argmax()) + 1].tolist()):
        owner.pop(address, None)
        if size > 0:
            owner[address] = index
    return sorted(index for index in owner.values() if delta[index] > 0)


def listed(events: np.ndarray, delta: np.ndarray, site: Callable[[int], list[int]]) -> list[dict[str, object]]:
    """Return the blocks at the peak, equal ones together, the most bytes first."""
    alive = at_peak(events, delta)
    frames = {index: site(index) for index in alive}
    names = _names({address for each in frames.values() for address in each})
    groups = Counter((int(delta[index]), _site([names[a] for a in frames[index]])) for index in alive)
    order = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])
    return [{"bytes": size, "count": count, "site": where} for (size, where), count in order]


def said(blocks: list[dict[str, object]], most: int = 20) -> list[str]:
    """Say which they are, one line for equal ones."""
    lines = [f"    {b['count']:>4} x {int(b['bytes']) / 2**20:9.3f} MiB  {b['site']}" for b in blocks[:most]]
    rest = sum(int(b["bytes"]) * int(b["count"]) for b in blocks[most:])
    return lines + ([f"    and {len(blocks) - most} more, {rest / 2**20:.3f} MiB together"] if rest else [])


def _site(names: list[str]) -> str:
    callers = [name for name in dict.fromkeys(names) if not PASSED_THROUGH.search(name)]
    return " < ".join(callers[:CALLERS] or names[-CALLERS:])


def _names(addresses: Iterable[int]) -> dict[int, str]:
    library = ctypes.CDLL(None)
    found: dict[int, str] = {}
    own: dict[str, list[tuple[int, int]]] = {}
    for address in addresses:
        symbol = _Symbol()
        # A caller's address is that of the instruction behind the call, perhaps the first of the next function.
        if not library.dladdr(ctypes.c_void_p(address - 1), ctypes.byref(symbol)):
            found[address] = hex(address)
            continue
        file = os.fsdecode(symbol.file)
        place = f"{os.path.basename(file)}+{address - 1 - symbol.base:#x}"
        found[address] = _plain(symbol.name.decode()) if symbol.name else place
        if OWN_SYMBOLS.search(os.path.basename(file)):
            found[address] = place
            own.setdefault(file, []).append((address, address - 1 - symbol.base))
    for file, places in own.items():
        for (address, _), name in zip(places, _debug_names(file, [offset for _, offset in places])):
            found[address] = name or found[address]
    return found


def _debug_names(file: str, offsets: list[int]) -> list[str]:
    """Function and line by addr2line; "" where it does not know them."""
    program = shutil.which("addr2line")
    if program is None:
        return [""] * len(offsets)
    command = [program, "-f", "-s", "-e", file, *map(hex, offsets)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    pairs = list(zip(lines[::2], lines[1::2]))
    return [f"{name} ({line})" if name != "??" else "" for name, line in pairs] or [""] * len(offsets)


def _plain(name: str) -> str:
    """A C++ name without its arguments."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    raw = demangle(name.encode(), None, None, ctypes.byref(status))
    if not raw:
        return name
    text = ctypes.string_at(raw).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(raw)
    return re.sub(r"\(.*", "", text)[:120]
