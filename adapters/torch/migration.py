# SPDX-License-Identifier: Apache-2.0
"""Wraps `sluice/migration.h` for tensors: sends the tensors of experts to other ranks while training runs. Wraps
`sluice_layer_move_*`, which decides which stage runs a layer that moves while a batch of a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..._library import load
from ...errors import InvalidArgument
from .group import EpGroup
from .options import values_of
from .placement import placement_of

_PHASES = ("none", "streams", "flushes", "ready", "agreed", "undecided", "committed", "aborted")


class Leaving(NamedTuple):
    """Names the tensors of one expert that goes to another rank of the group.

    number   of the expert, the same at both ends
    peer     the other rank's index in the group
    still    tensors that do not change from begin to the end of commit
    late     tensors that may change until commit is called: gradients
    """

    number: int
    peer: int
    still: Sequence[torch.Tensor]
    late: Sequence[torch.Tensor] = ()


class Arriving(Leaving):
    """Names the tensors that receive an expert, in the sizes and order of the sender's. They may also be leaving."""


class Migration:
    """Makes moves between the ranks of a group, one at a time.

    group             of two ranks or more; tensors are in host memory
    bytes_per_second  most that this rank sends between begin and commit; None: no limit
    staging_bytes     most staging memory of this rank; None: no limit
    epoch             of the current placement
    gives_way         whether other tcp messages of this process go first until commit
    """

    def __init__(
        self,
        group: EpGroup,
        bytes_per_second: int | None = None,
        staging_bytes: int | None = None,
        epoch: int = 0,
        gives_way: bool = True,
    ) -> None:
        if group.world_size < 2:
            raise InvalidArgument("a migration needs two ranks or more: this group has one")
        library = load()
        config, out = library.new("migration_config"), library.ffi.new("sluice_migration_t **")
        config.epoch, config.gives_way = epoch, gives_way
        config.bytes_per_second, config.staging_bytes = bytes_per_second or 0, staging_bytes or 0
        library.check(library.lib.sluice_migration_create(group.comm_on(placement_of(None)), config, out))
        self._handle: Any = out[0]
        self.calls = 0  # calls inside the library now: the group waits for them before it closes
        self._held: Sequence[Leaving] = ()  # tensors of the move that is under way
        group.adopt(self)

    def begin(self, epoch: int, items: Sequence[Leaving]) -> None:
        """Begins a move to `epoch`. Collective over the group, also for a rank that sends and receives nothing. Tensors
        stay as `still` and `late` promise. After an error (such as Mismatch or PeerRefused) nothing has moved."""
        library, ffi = load(), load().ffi
        array, kept = ffi.new("sluice_migration_item_t[]", max(1, len(items))), []
        for item, given in zip(array, items):
            tensors = [(t, 0) for t in given.still] + [(t, 1) for t in given.late]
            spans = ffi.new("sluice_migration_span_t[]", max(1, len(tensors)))
            for span, (tensor, when) in zip(spans, tensors):
                _check(given.number, tensor)
                span.data, span.when = ffi.cast("void *", tensor.data_ptr()), when
                span.bytes = tensor.numel() * tensor.element_size()
            kept.append(spans)
            item.id, item.peer, item.direction = given.number, given.peer, int(isinstance(given, Arriving))
            item.spans, item.num_spans = spans, len(tensors)
        with self._inside():
            library.check(library.lib.sluice_migration_begin(self._handle, epoch, array, len(items)))
        self._held = list(items)

    def commit(self, refusal: str | None = None) -> None:
        """Writes the received contents to their tensors, on all ranks or on none. refusal: why this rank cannot; all
        ranks get the text. Collective. PeerLost and TimedOut name a rank and a phase; `progress` says whether the move
        has ended."""
        library = load()
        text = library.ffi.NULL if refusal is None else library.ffi.new("char[]", refusal.encode())
        try:
            with self._inside():
                library.check(library.lib.sluice_migration_commit(self._handle, text))
        finally:
            if self.progress()["phase"] != "undecided":
                self._held = ()

    def read_early(self, item: Arriving, first: int) -> bool:
        """Returns whether the first `first` tensors of `item.still` have arrived. If so they are written before the
        commit, for a host that uses them until then. Call it between begin and commit, in the thread that commits. It
        is not collective and does not wait."""
        return self._read(item, [*item.still[:first], *[None] * (len(item.still) - first + len(item.late))])

    def read_late(self, item: Arriving, to: Sequence[torch.Tensor]) -> bool:
        """Returns whether all of `item.late` has arrived, after the sender called mark_still. If so it is copied into
        `to`, tensors of the same sizes. commit writes the item's own tensors. Otherwise as read_early."""
        return self._read(item, [*[None] * len(item.still), *to])

    def _read(self, item: Arriving, to: Sequence[torch.Tensor | None]) -> bool:
        library, ffi = load(), load().ffi
        spans, out = ffi.new("sluice_migration_span_t[]", max(1, len(to))), ffi.new("int32_t *")
        for span, tensor in zip(spans, to):
            if tensor is not None:
                span.data, span.bytes = ffi.cast("void *", tensor.data_ptr()), tensor.numel() * tensor.element_size()
        read = library.lib.sluice_migration_read_early
        library.check(read(self._handle, item.number, item.peer, spans, len(to), out))
        return bool(out[0])

    def mark_still(self, item: Leaving) -> None:
        """Declares that `item.late` does not change any more, so that it is sent now and commit waits for less. Call it
        between begin and commit, in the thread that commits. It is not collective."""
        library = load()
        library.check(library.lib.sluice_migration_mark_still(self._handle, item.number, item.peer))

    def settle(self, group: EpGroup | None = None) -> int:
        """Agrees on one epoch for all remaining ranks, after a rank was lost in commit, and returns the epoch. A phase
        "undecided" becomes "committed" or "aborted": arrived tensors are in place, or are dropped.

        group: all remaining ranks, in a group made after the loss; None: this rank alone, if no other remains. A rank
        that is not in the others' group must stop. Collective over `group`. InvalidState between begin and commit.
        After another error, such as a further loss, nothing has changed: settle again.
        """
        library = load()
        epoch = library.ffi.new("uint64_t *")
        comm = library.ffi.NULL if group is None else group.comm_on(placement_of(None))
        try:
            with self._inside():
                library.check(library.lib.sluice_migration_settle(self._handle, comm, epoch))
        finally:
            if self.progress()["phase"] != "undecided":
                self._held = ()
        return int(epoch[0])

    def abort(self, reason: str = "") -> None:
        """Keeps the old epoch. The others get the reason in commit. Not collective."""
        library = load()
        library.lib.sluice_migration_abort(self._handle, library.ffi.new("char[]", reason.encode()))
        self._held = ()

    def progress(self) -> dict[str, Any]:
        """Returns the fields of sluice_migration_progress_t, with the name of the phase."""
        library, ffi = load(), load().ffi
        found = ffi.new("sluice_migration_progress_t *")
        found.struct_size = ffi.sizeof(found[0])
        library.check(library.lib.sluice_migration_get_progress(self._handle, found))
        return {**values_of(found), "phase": _PHASES[found.phase]}

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def close(self) -> None:
        """Releases the migration, before the group closes. A second call has no effect."""
        if self._handle is not None:
            load().lib.sluice_migration_destroy(self._handle)
            self._handle, self._held = None, ()


def _check(number: int, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidArgument(
            f"expert {number}: a tensor {list(tensor.shape)} on "
            f"{tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}: migrations need contiguous host "
            "memory"
        )


class LayerMove:
    """Has the state of one of the two stages in one batch. is_lower: whether this is the lower stage, which gets
    activations from the upper one; to_lower: whether the layer goes to the lower stage. sluice/pipeline.h defines the
    words, which the host sends as the words of its edges."""

    def __init__(self, is_lower: bool, to_lower: bool) -> None:
        library = load()
        self._lib = library.lib
        self._move = library.ffi.new("sluice_layer_move_t *")
        self._lib.sluice_layer_move_begin(int(is_lower), int(to_lower), self._move)

    @property
    def receives(self) -> bool:
        """Returns whether the layer comes to this stage."""
        return bool(self._lib.sluice_layer_move_receives(self._move))

    @property
    def has(self) -> bool:
        """Returns whether the parameters have arrived: on the receiver, or by a message on the upper stage."""
        return bool(self._move.has)

    def arrived(self) -> None:
        """Notes, on the receiver, that the layer's parameters have arrived."""
        self._lib.sluice_layer_move_arrived(self._move)

    def heard(self, word: int) -> None:
        """Notes, on the upper stage, that a gradient with this word has arrived."""
        self._lib.sluice_layer_move_heard(self._move, word)

    def runs(self, micro_batch: int, word: int = 0) -> bool:
        """Returns whether the layer runs here in this forward and in its backward. word: the word of the activation
        that the lower stage received. Call it once for each micro-batch, in their order."""
        return bool(self._lib.sluice_layer_move_runs(self._move, micro_batch, word))

    def ended(self) -> None:
        """Notes the end of a backward of a micro-batch whose forward ran the layer here."""
        self._lib.sluice_layer_move_ended(self._move)

    @property
    def is_final(self) -> bool:
        """Returns whether the layer leaves this stage, and its gradients of this batch are final here."""
        return bool(self._lib.sluice_layer_move_is_final(self._move))

    def activation_word(self, ran: bool) -> int:
        """Returns the word of an activation of the upper stage."""
        return int(self._lib.sluice_layer_move_activation_word(int(ran)))

    def gradient_word(self) -> int:
        """Returns the word of a gradient of the lower stage."""
        return int(self._lib.sluice_layer_move_gradient_word(self._move))
