# SPDX-License-Identifier: Apache-2.0
"""Offloads layers: copies saved tensors out of memory after a layer's forward, and back before its backward.

Autograd passes each tensor that it saves to a hook. A storage is copied once, however many views of it are saved; views
are made again from the copy. The ops of `sluice/swap.h` begin copies and wait for them. They follow from two events of
each layer: its forward has ended, and its backward begins (a hook on its output's node).
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...errors import InvalidState, SluiceError
from . import swap as swaps
from .swap import Swap

LEAST_BYTES = 64 << 10  # smaller storages stay in memory: copying them costs more than it frees
_ABSENT = object()


class _Piece:
    """Has a storage that one layer has saved in one forward. Autograd's handles keep it alive."""

    def __init__(self, group: _Group, tensor: torch.Tensor) -> None:
        self.group = group
        self.source: torch.Tensor | None = tensor.detach()  # shares the version, without keeping the graph alive
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.ticket = 0
        self.near: torch.Tensor | None = None
        self.is_fetched, self.was_changed = False, False

    def __del__(self) -> None:
        if self.ticket:
            self.group.owner.forgotten.append((self.ticket, self.source, self.near))


class _Group:
    """Has the pieces that one layer has saved in one forward."""

    def __init__(self, owner: Offloaded, turn: _Turn, layer: int) -> None:
        self.owner, self.turn, self.layer = owner, turn, layer
        self.generation = owner.generation
        self._pieces: list[weakref.ref[_Piece]] = []

    def add(self, piece: _Piece) -> None:
        self._pieces.append(weakref.ref(piece))

    def __iter__(self) -> Iterator[_Piece]:
        return (piece for piece in (each() for each in self._pieces) if piece is not None)


class _Turn:
    """Represents one forward through the layers. It ends when none of its saved tensors is needed any more."""

    def __init__(self, owner: Offloaded, number: int) -> None:
        self.number = number
        self._over = owner.over

    def __del__(self) -> None:
        self._over.append(self.number)


class _Saved(NamedTuple):
    """Replaces, in autograd, a saved tensor whose storage is copied out."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Offloaded:
    """Offloads some layers of a model, until `undo`.

    layers     all layers by name, in the order in which they run; the backward of each is an event for the copies
    offloaded  the names of the layers whose saved tensors are copied out
    tier       "host", or a folder for a file
    at_once    each copy begins when it is needed and is waited for at once, which is for measuring bytes

    A layer's parameters and buffers, tensors that are not plain or not in host memory, and storages below least_bytes
    (64 KiB) are not copied. A batch whose copy fails raises External, which names the path; the next batch works.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        offloaded: Sequence[str],
        tier: str = swaps.HOST,
        *,
        bytes_per_second: float = 0.0,
        least_bytes: int | None = None,
        at_once: bool = False,
    ) -> None:
        self.names = list(layers)
        self.forgotten: deque[tuple[int, Any, Any]] = deque()  # pieces without handles; released with the next event
        self.over: deque[int] = deque()
        self.generation = 0
        self.out_bytes = [0] * len(layers)  # of each layer, copied out so far
        self._offloaded = [name in set(offloaded) for name in layers]
        self._least, self._at_once = LEAST_BYTES if least_bytes is None else least_bytes, at_once
        self._swap = Swap(self._offloaded, tier, bytes_per_second=bytes_per_second)
        self._turns: weakref.WeakValueDictionary[int, _Turn] = weakref.WeakValueDictionary()
        self._groups: weakref.WeakValueDictionary[tuple[int, int], _Group] = weakref.WeakValueDictionary()
        self._turn, self._last = 0, len(layers)
        self._before: list[tuple[nn.Module, Any]] = []
        for layer, module in enumerate(layers.values()):
            self._before.append((module, module.__dict__.get("forward", _ABSENT)))
            module.__dict__["forward"] = _Forward(self, layer, module, module.forward)

    def undo(self) -> None:
        """Restores each layer. Backwards of forwards that have run still work. A second call has no effect."""
        while self._before:
            module, forward = self._before.pop()
            if forward is _ABSENT:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward

    def expect(self) -> None:
        """Prepares the next backward, if no forward runs before it. Called by a host."""
        if self._turns and not self._at_once:
            self._reach(swaps.BACKWARD_NEXT, min(self._turns.keys()))

    def reset(self) -> None:
        """Forgets all forwards whose backwards have not run. Called after a batch that failed."""
        self.generation += 1
        self._swap.reset()  # first: a copy may read or write memory that pieces keep
        for group in list(self._groups.values()):
            for piece in group:
                piece.ticket = 0  # void
        self.forgotten.clear()
        self.over.clear()
        self._turns.clear()
        self._groups.clear()

    def stats(self) -> dict[str, int]:
        """Returns bytes copied and times so far (sluice_swap_stats_t)."""
        return self._swap.stats()

    # ---- forwards ----

    def run(self, layer: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a layer's own forward, and copies its saved tensors out."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return forward(*args, **kwargs)  # nothing is saved, or a checkpoint runs it again
        if layer <= self._last:
            self._turn += 1
        self._last, number = layer, self._turn
        if not self._offloaded[layer]:
            outputs = forward(*args, **kwargs)
        else:
            turn = self._turns.get(number) or _Turn(self, number)
            self._turns[number] = turn
            group = _Group(self, turn, layer)
            self._groups[number, layer] = group
            packing = _Packing(group, module, self._least)
            with saved_tensors_hooks(packing.pack, self._unpack):
                outputs = forward(*args, **kwargs)
            packing.close()
        self._reach(swaps.FORWARD_ENDS, number, layer)
        if not self._at_once:
            self._mark(outputs, number, layer)
        return outputs

    def _mark(self, outputs: Any, number: int, layer: int) -> None:
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self._reach(swaps.BACKWARD_BEGINS, number, layer))

    # ---- backwards ----

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        piece, group = saved.piece, saved.piece.group
        name = self.names[group.layer]
        if group.generation != self.generation:
            raise InvalidState(f"offload: the batch of this forward of {name} has failed: run the forward again")
        if not piece.is_fetched and piece.ticket and not self._at_once:
            self._reach(swaps.BACKWARD_BEGINS, group.turn.number, group.layer)
        if not piece.is_fetched and piece.ticket:  # the swap's ops no longer cover it
            self._guarded(lambda: self._fetch(piece))
        if piece.was_changed:
            raise InvalidState(
                f"offload: a tensor that {name} saved for its backward was changed in place before it had been "
                "copied out: keep this layer, or remove the in-place change"
            )
        whole = piece.near if piece.near is not None else piece.source
        assert whole is not None
        made = torch.empty(0, dtype=saved.dtype)
        return made.set_(whole.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _fetch(self, piece: _Piece) -> None:
        self._settle(piece)
        self._prefetch(piece)
        self._take(piece)

    # ---- ops ----

    def _reach(self, event: int, number: int, layer: int = 0) -> None:
        self._guarded(lambda: self._follow(event, number, layer))

    def _follow(self, event: int, number: int, layer: int) -> None:
        while self.over:
            self._run_ops(swaps.BACKWARD_ENDS, self.over.popleft(), 0)
        while self.forgotten:
            self._swap.release(self.forgotten[0][0])
            self.forgotten.popleft()  # frees the memory that its copy has read or written
        self._run_ops(event, number, layer)

    def _run_ops(self, event: int, number: int, layer: int) -> None:
        for op in self._swap.reach(event, number, layer):
            if op.kind == swaps.RELEASE:
                continue  # a retained graph may need the piece again: it is released with its last handle
            group = self._groups.get((op.micro_batch, op.layer))
            for piece in group or ():
                _RUN[op.kind](self, piece)
                if self._at_once and op.kind == swaps.PUT:
                    self._settle(piece)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs `action`. An error of a copy resets the swap, so that the next batch works."""
        try:
            action()
        except SluiceError:
            self.reset()
            raise

    def _put(self, piece: _Piece) -> None:
        assert piece.source is not None
        piece.ticket = self._swap.put(piece.source.untyped_storage().data_ptr(), piece.nbytes)
        self.out_bytes[piece.group.layer] += piece.nbytes

    def _settle(self, piece: _Piece) -> None:
        if piece.source is None or not piece.ticket:
            return
        self._swap.settle(piece.ticket)
        piece.was_changed = piece.source._version != piece.version
        piece.source = None

    def _prefetch(self, piece: _Piece) -> None:
        if piece.ticket and piece.near is None:
            piece.near = torch.empty(piece.nbytes, dtype=torch.uint8)
            self._swap.prefetch(piece.ticket, piece.near.data_ptr())

    def _take(self, piece: _Piece) -> None:
        if piece.ticket:
            self._swap.take(piece.ticket)
            piece.ticket, piece.is_fetched = 0, True


_RUN: dict[int, Callable[[Offloaded, _Piece], None]] = {
    swaps.PUT: Offloaded._put,
    swaps.SETTLE: Offloaded._settle,
    swaps.PREFETCH: Offloaded._prefetch,
    swaps.TAKE: Offloaded._take,
}


class _Packing:
    """Implements the saved-tensor hook of one forward."""

    def __init__(self, group: _Group, module: nn.Module, least_bytes: int) -> None:
        self._group, self._least = group, least_bytes
        own = (*module.parameters(), *module.buffers())
        self._own = {each.untyped_storage().data_ptr() for each in own if each.layout is torch.strided}
        self._pieces: dict[int, _Piece] = {}  # by the address of the storage

    def pack(self, tensor: torch.Tensor) -> Any:
        if not _is_plain(tensor):
            return tensor.detach() if not tensor.is_leaf else tensor
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._own or storage.nbytes() < self._least:
            return tensor.detach() if not tensor.is_leaf else tensor
        piece = self._pieces.get(where)
        if piece is None or piece.version != tensor._version:
            # A piece that was changed since has to be refused. Its version shows that when its copy ends.
            piece = self._pieces[where] = _Piece(self._group, tensor)
            self._group.add(piece)
        return _Saved(piece, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def close(self) -> None:
        """Drops the references to pieces, so that only handles keep them alive."""
        self._pieces.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Forward:
    """Replaces a layer's forward. A deep copy of the layer gets the layer's own forward, and is not offloaded."""

    def __init__(self, owner: Offloaded, layer: int, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._owner, self._layer, self._forward = owner, layer, forward
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return self._owner.run(self._layer, module, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)
