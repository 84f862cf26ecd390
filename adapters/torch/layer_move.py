# SPDX-License-Identifier: Apache-2.0
"""`sluice_layer_move_*` for torch: who runs a layer that changes its stage while a batch of a pipeline runs."""

from __future__ import annotations

from ..._library import load


class LayerMove:
    """One of the two stages, in one batch. is_lower: of the two it is the one behind the layer's cut; to_lower: the
    layer goes there. Words are those of sluice/pipeline.h; the host carries them in the words of its edges."""

    def __init__(self, is_lower: bool, to_lower: bool) -> None:
        library = load()
        self._lib = library.lib
        self._move = library.ffi.new("sluice_layer_move_t *")
        self._lib.sluice_layer_move_begin(int(is_lower), int(to_lower), self._move)

    @property
    def receives(self) -> bool:
        """Whether the layer comes to this stage."""
        return bool(self._lib.sluice_layer_move_receives(self._move))

    @property
    def has(self) -> bool:
        """Of the receiver: its parameters are here. Of the upper stage: or it has heard so."""
        return bool(self._move.has)

    def arrived(self) -> None:
        """Its parameters are here, with the receiver."""
        self._lib.sluice_layer_move_arrived(self._move)

    def heard(self, word: int) -> None:
        """The upper stage has got a gradient with this word."""
        self._lib.sluice_layer_move_heard(self._move, word)

    def runs(self, micro_batch: int, word: int = 0) -> bool:
        """Whether the layer runs here in this forward, and so in its backward. word: of the activation that the lower
        stage was given. Once for each micro-batch, in their order."""
        return bool(self._lib.sluice_layer_move_runs(self._move, micro_batch, word))

    def ended(self) -> None:
        """The backward of a micro-batch whose forward ran the layer here."""
        self._lib.sluice_layer_move_ended(self._move)

    @property
    def is_final(self) -> bool:
        """Whether the layer leaves this stage, and its gradients of this batch do not change here any more."""
        return bool(self._lib.sluice_layer_move_is_final(self._move))

    def activation_word(self, ran: bool) -> int:
        """What goes with an activation of the upper stage."""
        return int(self._lib.sluice_layer_move_activation_word(int(ran)))

    def gradient_word(self) -> int:
        """What goes with a gradient of the lower stage."""
        return int(self._lib.sluice_layer_move_gradient_word(self._move))
