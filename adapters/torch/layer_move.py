# SPDX-License-Identifier: Apache-2.0
"""Wraps `sluice_layer_move_*`: decides which stage runs a layer that moves while a batch of a pipeline runs."""

from __future__ import annotations

from ..._library import load


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
