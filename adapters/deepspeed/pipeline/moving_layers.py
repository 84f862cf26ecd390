# SPDX-License-Identifier: Apache-2.0
"""Moves layers of a `PipelineModule` between stages, with their parameters, gradients, buffers and optimizer states,
between two batches, when no micro-batch is in flight.

All ranks agree on the move before it begins. The new stages have built the layers by then, so that a refused move
changes nothing. Each replica of the pipeline moves its own layers. Source: vPipe (TPDS 2022), section on live
migration, here with a drain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.common import agree
from sluice.adapters.common.migration import shipments
from sluice.adapters.common.migration.shipments import Content, Shipment
from sluice.adapters.deepspeed.optimizer import optimizer_parts
from sluice.adapters.deepspeed.optimizer.optimizer_parts import Kept
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.errors import Unsupported
from sluice.planning.layer_moves import Trained
from torch import nn

_HOME = "_sluice_home_parts"  # attribute of an engine
_KEPT = "kept "  # prefix of the names of optimizer states


class Move(NamedTuple):
    """The move of one layer between two stages."""

    layer: int
    source: int
    target: int


class Moved(NamedTuple):
    """The result of a move. travel_s: seconds in which this rank only sent and received layers."""

    moves: list[Move]
    travel_s: float


def move(
    engine: Any,
    parts: Sequence[int],
    wait_s: float | None = None,
    refused: str = "",
    compared: dict[str, Any] | None = None,
) -> Moved:
    """Moves layers so that stage s has the layers from parts[s] to before parts[s + 1]. Called between batches.

    Collective over all ranks of the pipeline and its replicas, with the same arguments. The module, the optimizer and
    its groups remain the same objects; an arriving layer is a new object. refused: why this rank cannot move;
    compared: other values that must be equal on all ranks. If all ranks raise UnsupportedError or
    agree.DisagreementError, nothing has moved.
    """
    module, parts = engine.module, [int(bound) for bound in parts]
    optimizer = optimizer_parts.of_engine(engine)
    moves, built = agreed(engine, {"parts": parts, **(compared or {})}, refused, optimizer, wait_s)
    if not moves:
        return Moved([], 0.0)
    kept = optimizer.take(list(module.parameters()))
    going = {each.layer: stage_module.function_of(module, each.layer) for each in moves if goes(module, each)}
    contents = {layer: content_of(function, kept) for layer, function in going.items()}
    listed = described(module, moves, contents, wait_s)
    begun = time.perf_counter()
    # The contents of arriving layers. Each replica exchanges among its own ranks.
    arrived = dict(zip([each.layer for each in moves if comes(module, each)], shipments.exchange(listed)))
    travel_s = time.perf_counter() - begun
    for layer, content in arrived.items():
        stage_module.fill(built[layer], content)
    put_in_force(engine, parts, built, arrived, optimizer, kept)
    return Moved(moves, travel_s)


def put_in_force(
    engine: Any,
    parts: Sequence[int],
    built: dict[int, Any],
    arrived: dict[int, Content],
    optimizer: Any,
    kept: dict[nn.Parameter, Kept],
) -> None:
    """Puts the new partition into effect. built: arriving layers, with their contents filled in; kept: the optimizer
    states of the layers that were here."""
    module = engine.module
    vars(engine).setdefault(_HOME, stage_module.parts_of(module))
    stage_module.replace(module, parts, built)
    engine.param_names = {parameter: name for name, parameter in module.named_parameters()}
    for layer, content in arrived.items():
        kept.update(_kept_of(built[layer], content))
    optimizer.put({parameter: kept[parameter] for parameter in module.parameters() if parameter in kept})
    if hasattr(engine, "pipe_buffers"):  # the engine is fully constructed
        engine.reset_activation_shape()


def home_of(engine: Any) -> tuple[int, ...] | None:
    """The partition with which the training began; None: it is in force."""
    home: tuple[int, ...] | None = getattr(engine, _HOME, None)
    return home if home is not None and home != stage_module.parts_of(engine.module) else None


def settle(engine: Any) -> None:
    """Makes the current partition the one with which the training begins."""
    vars(engine).pop(_HOME, None)


# ---- before anything moves ----


def agreed(
    engine: Any, wanted: dict[str, Any], refused: str, optimizer: Any, wait_s: float | None
) -> tuple[list[Move], dict[int, Any]]:
    """Returns the moves and the newly built layers that come here, on all ranks, or raises an error on all."""
    module, parts = engine.module, wanted["parts"]
    own: dict[str, Any] = {"wanted": wanted, "settings": optimizer.settings(), "gone": {}, "built": {}}
    own["groups"] = {layer: groups_of(module, layer, optimizer) for layer in stage_module.layers_of(module)}
    moves: list[Move] = []
    built: dict[int, Any] = {}
    refused = refused or stage_module.why_no_partition(module, parts)
    if not refused:
        moves = moves_of(module, parts)
        refused = _why_not(module, moves, optimizer)
    if not refused:
        try:
            built = {each.layer: stage_module.build(module, each.layer) for each in moves if comes(module, each)}
        except Exception as error:  # the user's own constructor
            refused = f"a layer could not be built: {type(error).__name__}: {error}"
    own["refused"] = refused
    own["built"] = {layer: stage_module.names_of(function) for layer, function in built.items()}
    own["gone"] = {each.layer: _names(module, each.layer) for each in moves if goes(module, each)}
    answers = agree.exchange(_ranks(), torch.distributed.get_rank(), own, wait_s)
    agree.require_equal("moving layers", {rank: answer["wanted"] for rank, answer in answers.items()})
    for rank, answer in answers.items():
        if answer["refused"]:
            raise UnsupportedError(f"layers cannot move: {answer['refused']} (on rank {rank})")
    _require_as_many_groups({rank: answer["settings"] for rank, answer in answers.items()})
    agree.require_equal(
        "moving layers: the optimizers of stages differ",
        {rank: _flattened(answer["settings"]) for rank, answer in answers.items()},
    )
    if moves:
        _require_groups(module, parts, answers, optimizer.needs_all_groups)
    _require_alike(answers)
    return moves, built


def groups_of(module: Any, layer: int, optimizer: Any) -> list[int]:
    """The optimizer's groups in which the layer has trained parameters that count."""
    counted = [
        p
        for p in stage_module.parameters_of(module, layer)
        if p.requires_grad and (optimizer.counts_copies or not getattr(p, "ds_pipe_replicated", False))
    ]
    return sorted({group for group in optimizer.groups_of(counted) if group is not None})


def _require_groups(module: Any, parts: Sequence[int], answers: dict[int, Any], needs_all: bool) -> None:
    """Requires every stage to train something, since its backward and the host's gradient norm fail otherwise.
    needs_all: in every group of the optimizer, as DeepSpeed's own optimizers require."""
    held = {int(layer): groups for answer in answers.values() for layer, groups in answer["groups"].items()}
    trained = Trained([frozenset(held[layer]) for layer in sorted(held)], needs_all)
    before = stage_module.parts_of(module)
    for stage, (first, last) in enumerate(zip(parts, parts[1:])):
        missing = trained.missing(first, last, before[stage : stage + 2])
        if missing:
            of = f" in group {missing[0]} of the optimizer, which DeepSpeed's optimizer needs" if needs_all else ""
            some = next(layer for layer, groups in enumerate(trained.groups) if missing[0] in groups)
            raise UnsupportedError(
                f"layers cannot move: stage {stage} would have no trainable parameter of its own{of} in layers {first} "
                f"to {last - 1}: leave it a layer with some, as layer {some} has"
            )


def _require_as_many_groups(settings: dict[int, list[dict[str, str]]]) -> None:
    """Requires equal numbers of groups. DeepSpeed makes a separate group of trained experts on ranks that have some."""
    most = max(settings, key=lambda rank: len(settings[rank]))
    fewest = min(settings, key=lambda rank: len(settings[rank]))
    if len(settings[most]) > len(settings[fewest]):
        raise UnsupportedError(
            f"moving layers: the optimizers of stages differ: that of rank {fewest} has {len(settings[fewest])} "
            f"parameter groups, and that of rank {most} has {len(settings[most])}: a stage without trained experts has "
            "no group of experts. Leave each stage some, or let layers stay"
        )


def _flattened(settings: Sequence[dict[str, str]]) -> dict[str, str]:
    members = {f"group {i}: {key}": value for i, group in enumerate(settings) for key, value in group.items()}
    return members


def _require_alike(answers: dict[int, Any]) -> None:
    gone = {layer: names for answer in answers.values() for layer, names in answer["gone"].items()}
    for rank, answer in answers.items():
        for layer, names in answer["built"].items():
            if names != gone[layer]:
                raise UnsupportedError(
                    f"layers cannot move: layer {layer} has {', '.join(gone[layer])}, and rank {rank} built one with "
                    f"{', '.join(names)}: what makes a layer has to make the same on all ranks"
                )


def moves_of(module: Any, parts: Sequence[int]) -> list[Move]:
    pairs = zip(stage_module.owners(stage_module.parts_of(module)), stage_module.owners(parts))
    return [Move(layer, old, new) for layer, (old, new) in enumerate(pairs) if old != new]


def comes(module: Any, each: Move) -> bool:
    return bool(each.target == module.stage_id)


def goes(module: Any, each: Move) -> bool:
    return bool(each.source == module.stage_id)


def _why_not(module: Any, moves: Sequence[Move], optimizer: Any) -> str:
    """Why this rank cannot make these moves; "": it can."""
    if max(module._topo.get_dim("model"), 1) > 1:
        return "the topology has tensor parallelism"
    reason = optimizer.why_not() if moves else ""
    if reason:
        return f"what the optimizer keeps of layers cannot be taken out: {reason}"
    going = (each.layer for each in moves if goes(module, each))
    return next((why for why in (stage_module.why_pinned(module, layer) for layer in going) if why), "")


def _names(module: Any, layer: int) -> list[str]:
    return stage_module.names_of(stage_module.function_of(module, layer))


# ---- what moves ----


def content_of(function: Any, kept: dict[nn.Parameter, Kept]) -> Content:
    """The content of a layer with its optimizer states."""
    content = dict(stage_module.content_of(function))
    for name, parameter in function.named_parameters() if isinstance(function, nn.Module) else ():
        if parameter in kept:
            group, state = kept[parameter]
            content[f"{name} group"] = group
            content.update({f"{name} {_KEPT}{key}": value for key, value in state.items()})
    return content


def is_kept(name: str) -> bool:
    """Whether a member of a content is an optimizer state."""
    return f" {_KEPT}" in name


def _kept_of(function: Any, content: Content) -> dict[nn.Parameter, Kept]:
    """The optimizer states in the content of an arriving layer."""
    found = {}
    for name, parameter in function.named_parameters() if isinstance(function, nn.Module) else ():
        if f"{name} group" in content:
            prefix = f"{name} {_KEPT}"
            state = {key[len(prefix) :]: value for key, value in content.items() if key.startswith(prefix)}
            found[parameter] = Kept(content[f"{name} group"], state)
    return found


def described(module: Any, moves: Sequence[Move], contents: dict[int, Content], wait_s: float | None) -> list[Shipment]:
    """The shipments of all moves of this rank's replica, described on both ends. Collective over all ranks."""
    own: dict[str, Any] = {}
    try:
        own = {str(layer): shipments.describe(content) for layer, content in contents.items()}
    except Unsupported as error:
        own = {"refused": error.message}
    answers = agree.exchange(_ranks(), torch.distributed.get_rank(), own, wait_s)
    for rank, answer in answers.items():
        if "refused" in answer:
            raise UnsupportedError(f"layers cannot move: {answer['refused']} (on rank {rank})")
    replica = module._grid.get_data_parallel_id()
    listed = []
    for layer, source, target in moves:
        first, last = (module._grid.stage_to_global(stage_id=stage, data=replica) for stage in (source, target))
        listed.append(Shipment(first, last, contents.get(layer), answers[first][str(layer)]))
    return listed


def _ranks() -> range:
    return range(torch.distributed.get_world_size())
