# SPDX-License-Identifier: Apache-2.0
"""Measures the peak activation memory of MoE layers in the same way for stock and for Sluice.

The watch (alloc_watch.c) counts every block of 4 KiB or more that the process allocates with malloc while the watch is
on: tensors that autograd saves, temporaries, padded buffers, library scratch, Sluice's slots and metadata, gloo's
staging. As in a training step, the forward passes of all layers come before their backward passes. Parameter gradients
do not count, because both sides need them; their addresses identify them after a pass. The watch starts before the
layers are swapped and covers a first pass as well, so memory that Sluice keeps between passes counts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SOURCE = Path(__file__).with_name("alloc_watch.c")
EVENT = np.dtype([("address", "<u8"), ("bytes", "<i8")])


def build_watch(folder: Path) -> tuple[Path | None, str]:
    """Compile the watch into `folder`; (path, "") or (None, the reason in one sentence)."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return None, "Memory is not measured: no C compiler is installed."
    target = folder / "alloc_watch.so"
    command = [compiler, "-O2", "-std=gnu11", "-shared", "-fPIC", "-fno-builtin", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return None, f"Memory is not measured: {SOURCE.name} did not compile ({done.stderr.strip()[:200]})."
    return target.resolve(), ""


class Watch:
    """Python interface of the preloaded log."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("alloc_watch_used", "alloc_watch_capacity"):
            getattr(self._library, name).restype = ctypes.c_uint64
        self._library.alloc_watch_log.restype = ctypes.c_void_p

    @staticmethod
    def available() -> bool:
        """Whether this process was started with the watch preloaded."""
        return hasattr(ctypes.CDLL(None), "alloc_watch_start")

    def start(self) -> None:
        """Empty the log and start logging."""
        self._library.alloc_watch_start()

    def position(self) -> int:
        """Return how many events have been logged; fails if the log overflowed."""
        used = int(self._library.alloc_watch_used())
        if used > self._library.alloc_watch_capacity():
            raise RuntimeError("the allocation log overflowed; measure fewer passes")
        return used

    def stop(self) -> np.ndarray:
        """Stop logging and return the events."""
        self._library.alloc_watch_stop()
        used = self.position()
        address = self._library.alloc_watch_log()
        raw = (ctypes.c_char * (used * EVENT.itemsize)).from_address(address)
        return np.frombuffer(bytes(raw), dtype=EVENT)


@dataclass(frozen=True)
class Kept:
    """Addresses of parameter gradients that were alive at a position of the log."""

    position: int
    addresses: tuple[int, ...]


def live_bytes(events: np.ndarray, kept: Sequence[Kept]) -> np.ndarray:
    """Bytes alive after each event, without blocks from before the log and without kept gradients."""
    owner: dict[int, int] = {}  # address -> index of the event that allocated it
    delta = np.zeros(len(events), dtype=np.int64)
    pending = sorted(kept, key=lambda k: k.position)
    for index, (address, size) in enumerate(events.tolist()):
        while pending and pending[0].position <= index:
            _forget(owner, events, delta, pending.pop(0).addresses)
        if size > 0:
            owner[address] = index
            delta[index] = size
        elif address in owner:
            born = owner.pop(address)
            delta[index] = -delta[born]  # 0 for a kept gradient
    for rest in pending:
        _forget(owner, events, delta, rest.addresses)
    return np.cumsum(delta)


def _forget(owner: dict[int, int], events: np.ndarray, delta: np.ndarray, addresses: Iterable[int]) -> None:
    """Do not count the blocks that contain these addresses, from their allocation on."""
    starts = np.array(sorted(owner), dtype=np.uint64)
    if len(starts) == 0:
        return
    for address in addresses:
        at = int(np.searchsorted(starts, np.uint64(address), side="right")) - 1
        if at < 0:
            continue
        born = owner[int(starts[at])]
        if address < int(starts[at]) + int(events[born]["bytes"]):
            delta[born] = 0


def moe_peak_bytes(
    layers: Sequence[nn.Module],
    inputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor],
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    prepare: Callable[[], object] | None = None,
    passes: int = 2,
) -> dict[str, Any]:
    """Peak and saved bytes over `passes` training passes of all layers. The watch also covers `prepare` (a swap)."""
    parameters = [p for layer in layers for p in layer.parameters()]
    watch = Watch()
    kept: list[Kept] = []
    for parameter in parameters:
        parameter.grad = None
    after_forward = 0
    watch.start()
    if prepare is not None:
        prepare()
    for _ in range(passes):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = [call(layer, leaf) for layer, leaf in zip(layers, leaves, strict=True)]
        after_forward = watch.position()
        for index in reversed(range(len(layers))):
            outputs[index].backward(output_gradients[index])
            outputs[index] = torch.empty(0)
            leaves[index] = torch.empty(0)
        kept.append(Kept(watch.position(), tuple(p.grad.data_ptr() for p in parameters if p.grad is not None)))
        for parameter in parameters:
            parameter.grad = None
        del leaves, outputs
    live = live_bytes(watch.stop(), kept)
    if len(live) == 0:
        return {"peak_bytes": 0, "saved_bytes": 0}
    return {"peak_bytes": int(live.max()), "saved_bytes": int(live[min(after_forward, len(live)) - 1])}
