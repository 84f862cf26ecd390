# SPDX-License-Identifier: Apache-2.0
"""Moves layers of a `PipelineModule` between stages, with their parameters, gradients, buffers and optimizer states,
between two batches, when no micro-batch is in flight.

All ranks first agree on the move, after the new stages have built their layers, so that a refused move changes nothing.
Then they vote on each step: an error on one rank fails the move on all ranks, and no layer has moved. Each replica of
the pipeline moves its own layers. Source: vPipe (TPDS 2022), section on live migration, here with a drain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from sluice.adapters.common import agree
from sluice.adapters.common.migration import shipments
from sluice.adapters.common.migration.shipments import Content, Shipment
from sluice.adapters.common.vote import Vote, first_reason
from sluice.adapters.deepspeed.optimizer import optimizer_parts
from sluice.adapters.deepspeed.optimizer.optimizer_parts import Kept
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.errors import InvalidState
from sluice.planning.layer_moves import Trained
from torch import nn

T = TypeVar("T")
_HOME = "_sluice_home_parts"  # attributes of an engine: the partition at the start of training ...
_TORN = "_sluice_torn_layers"  # ... and why its ranks may have different layers
_NONE_MOVED = "No layer has moved: move again, or train on"
_KEPT = "kept "  # prefix of the name of an optimizer state


class Move(NamedTuple):
    """The move of one layer between two stages."""

    layer: int
    source: int
    target: int


class Moved(NamedTuple):
    """The result of a move. travel_s: seconds in which this rank only sent and received layers."""

    moves: list[Move]
    travel_s: float


class Meeting(Vote):
    """A vote on a move of layers by all ranks of the pipeline and its replicas. Answers go through torch's store."""

    def __init__(self, moves: Sequence[Move], wait_s: float | None) -> None:
        layers = ", ".join(str(each.layer) for each in moves)
        super().__init__(f"layer{'s' * (len(moves) > 1)} {layers}", None, list(_ranks()), None, wait_s)

    def do(self, what: str, step: Callable[[], T], then: str = _NONE_MOVED) -> T:
        """Returns the step's result. If it fails on a rank, all raise UnsupportedError, whose text ends with `then`."""
        self._what, self._then = what, then
        return self.take(step)

    def tell(self, value: Any) -> list[Any]:
        """See Vote."""
        own, lost = torch.distributed.get_rank(), "did not answer: start all ranks again, from the last checkpoint"
        with self._answered():
            return list(agree.exchange(_ranks(), own, value, self.wait_s, lost).values())

    def ask(self, why_not: str, error: Exception | None = None) -> None:
        """See Vote. Raises the same error on all ranks."""
        rank, why = first_reason(self.tell(why_not))
        if why:
            text = f"{self.name} cannot move: {self._what} failed on rank {rank}: {why}. {self._then}"
            raise UnsupportedError(text, peer=rank) from error


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
    meeting = Meeting(moves, wait_s)
    kept = taken(optimizer, list(module.parameters()), meeting)
    gone = going(module, moves)
    listed = described(
        module, moves, meeting, lambda n: {**content_of(gone[n], kept), **engine.sluice.experts.pack(gone[n])}
    )
    # The shipments to this stage, by layer. Each replica has its own ranks.
    arriving = {each.layer: shipment for each, shipment in zip(moves, listed) if comes(module, each)}
    arrived = meeting.do("making room", lambda: {n: shipments.places(each) for n, each in arriving.items()})
    # A third of the wait: ranks that find another one missing say so while the rest still waits for the vote.
    most_s = meeting.wait_s / 3
    travel_s = meeting.do("sending", lambda: shipments.exchange(listed, list(arrived.values()), most_s))
    meeting.do("loading", lambda: [stage_module.fill(built[layer], content) for layer, content in arrived.items()])
    put_in_force(engine, parts, built, arrived, optimizer, kept, meeting)
    return Moved(moves, travel_s)


def taken(
    optimizer: Any, parameters: Sequence[nn.Parameter], meeting: Meeting, failed: str = _NONE_MOVED
) -> dict[nn.Parameter, Kept]:
    """Returns the optimizer states of these parameters. Collective over all ranks."""
    states = "taking the optimizer's states"
    kept: dict[nn.Parameter, Kept] = meeting.do(states, lambda: optimizer.take(parameters), failed)
    optimizer.gather(kept)
    return kept


def put_in_force(
    engine: Any,
    parts: Sequence[int],
    built: dict[int, Any],
    arrived: dict[int, Content],
    optimizer: Any,
    kept: dict[nn.Parameter, Kept],
    meeting: Meeting,
    failed: str = _NONE_MOVED,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Puts the new partition into effect. Collective over all ranks: after an error on one, all restore the old one.

    built: the arriving layers, filled from `arrived`; kept: the optimizer states of this stage's old layers. failed:
    the end of the error text; then: the last step.
    """
    module = engine.module
    before, home = stage_module.parts_of(module), getattr(engine, _HOME, None)
    functions = {layer: stage_module.function_of(module, layer) for layer in stage_module.layers_of(module)}
    states = dict(kept)

    def put(where: Sequence[int], layers: dict[int, Any], home: Any) -> None:
        setattr(engine, _HOME, home)
        stage_module.replace(module, where, layers)
        engine.sluice.experts.refresh(engine)
        engine.param_names = {parameter: name for name, parameter in module.named_parameters()}
        optimizer.put({parameter: states[parameter] for parameter in module.parameters() if parameter in states})
        if hasattr(engine, "pipe_buffers"):  # the engine is fully constructed
            engine.reset_activation_shape()

    def forwards() -> None:
        for layer, content in arrived.items():
            states.update(_kept_of(built[layer], content))
            engine.sluice.experts.adopt(engine, layer, built[layer], content)
        put(parts, {**functions, **built}, before if home is None else home)
        then()

    try:
        meeting.do("putting the move in force", forwards, failed)
    except BaseException as error:
        if not isinstance(error, Exception) or meeting.is_lost:  # the state of the other ranks is unknown
            tear(engine, error)
            raise
        try:
            meeting.do("putting layers back", lambda: put(before, functions, home), "")
        except Exception as worse:
            tear(engine, worse)
            raise InvalidState(why_torn(engine)) from error
        for function in built.values():
            engine.sluice.experts.release(function)
        raise
    here = stage_module.layers_of(module)
    engine.sluice.experts.settle(
        ((built[layer], content) for layer, content in arrived.items()),
        (function for layer, function in functions.items() if layer not in here),
    )


def tear(engine: Any, why: object) -> None:
    """Marks the engine, so that its batches and moves are refused from now on."""
    setattr(
        engine,
        _TORN,
        "a move of layers was interrupted, and layers may be missing or be on two stages: start all ranks again, from "
        f"the last checkpoint. The cause: {why}",
    )


def why_torn(engine: Any) -> str:
    """Returns why the engine cannot run any more; "": no move was interrupted."""
    return str(getattr(engine, _TORN, ""))


def home_of(engine: Any) -> tuple[int, ...] | None:
    """Returns the partition with which the training began; None: it is in force."""
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
    own: dict[str, Any] = {"wanted": wanted}
    moves: list[Move] = []
    built: dict[int, Any] = {}
    refused = why_torn(engine) or refused or stage_module.why_no_partition(module, parts)
    what = "the optimizer could not be read"
    try:
        own["settings"] = optimizer.settings()
        own["groups"] = {layer: groups_of(module, layer, optimizer) for layer in stage_module.layers_of(module)}
        if not refused:
            moves = moves_of(module, parts)
            refused = _why_not(engine, moves, optimizer)
        what = "a layer could not be built"
        if not refused:
            built = {each.layer: stage_module.build(module, each.layer) for each in moves if comes(module, each)}
        own["built"] = {layer: stage_module.names_of(function) for layer, function in built.items()}
        gone = going(module, moves)
        own["gone"] = {layer: stage_module.names_of(function) for layer, function in gone.items()}
        own |= _expert_groups(engine, gone)
    except Exception as error:  # for example in the constructor of a user's layer
        refused = f"{what}: {type(error).__name__}: {error}"
    own["refused"] = refused
    answers = agree.exchange(_ranks(), torch.distributed.get_rank(), own, wait_s)
    agree.require_equal("moving layers", {rank: answer["wanted"] for rank, answer in answers.items()})
    for rank, answer in answers.items():
        if answer["refused"]:
            raise UnsupportedError(f"layers cannot move: {answer['refused']} (on rank {rank})")
    _require_expert_groups(engine, moves, answers)
    _require_as_many_groups({rank: answer["settings"] for rank, answer in answers.items()})
    agree.require_equal(
        "moving layers: the optimizers of stages differ",
        {rank: _flattened(answer["settings"]) for rank, answer in answers.items()},
    )
    if moves:
        _require_groups(module, parts, answers, optimizer.needs_all_groups)
    _require_alike(answers)
    if moves and engine.sluice.decider is not None:
        engine.sluice.decider.cancel("layers move to other stages")
    return moves, built


def groups_of(module: Any, layer: int, optimizer: Any) -> list[int]:
    """Returns the optimizer's groups in which the layer has trained parameters that count."""
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
    return {f"group {i}: {key}": value for i, group in enumerate(settings) for key, value in group.items()}


def _require_alike(answers: dict[int, Any]) -> None:
    gone = {layer: names for answer in answers.values() for layer, names in answer["gone"].items()}
    for rank, answer in answers.items():
        for layer, names in answer["built"].items():
            if names != gone[layer]:
                raise UnsupportedError(
                    f"layers cannot move: layer {layer} has {', '.join(gone[layer])}, and rank {rank} built one with "
                    f"{', '.join(names)}: a layer must be built in the same way on all ranks"
                )


def _require_expert_groups(engine: Any, moves: Sequence[Move], answers: dict[int, Any]) -> None:
    """Requires that the new stage has the expert-parallel groups of every MoE layer that moves to it."""
    why = next((why for why in (_why_no_groups(engine, move, answers) for move in moves) if why), "")
    if why:
        raise UnsupportedError(f"layers cannot move: {why}")


def _why_no_groups(engine: Any, move: Move, answers: dict[int, Any]) -> str:
    """Returns why a layer's MoE layers cannot run on its new stage; "": they can. answers: of `_expert_groups`."""
    module = engine.module
    for coordinate in module._topo.get_axis_list("pipe", move.source):
        names = answers[coordinate]["experts"][str(move.layer)]
        replica = getattr(module._topo.get_coord(coordinate), "data", 0)
        there = answers[module._grid.stage_to_global(stage_id=move.target, data=replica)]["layouts"]
        needed = {name: answers[coordinate]["layouts"].get(name) for name in names}
        why = str(engine.sluice.experts.why_other_groups(move.layer, move.target, needed, there))
        if why:
            return why
    return ""


def _expert_groups(engine: Any, layers: Iterable[int]) -> dict[str, Any]:
    """Returns this rank's expert-parallel groups, and the groups that MoE layers in these layers of its stage use."""
    module, experts = engine.module, engine.sluice.experts
    names = {layer: experts.group_names(stage_module.function_of(module, layer)) for layer in layers}
    return {"layouts": experts.layouts(module, engine.sluice), "experts": names}


def without_groups(engine: Any, wait_s: float | None) -> frozenset[int]:
    """Returns layers whose MoE layers cannot run on every stage. Collective over all ranks, with the same result."""
    parts = stage_module.parts_of(engine.module)
    own = _expert_groups(engine, stage_module.layers_of(engine.module))
    answers = agree.exchange(_ranks(), torch.distributed.get_rank(), own, wait_s)
    stages = range(len(parts) - 1)
    moves = [Move(n, source, target) for n, source in enumerate(stage_module.owners(parts)) for target in stages]
    return frozenset(move.layer for move in moves if _why_no_groups(engine, move, answers))


def moves_of(module: Any, parts: Sequence[int]) -> list[Move]:
    pairs = zip(stage_module.owners(stage_module.parts_of(module)), stage_module.owners(parts))
    return [Move(layer, old, new) for layer, (old, new) in enumerate(pairs) if old != new]


def comes(module: Any, each: Move) -> bool:
    return bool(each.target == module.stage_id)


def going(module: Any, moves: Sequence[Move]) -> dict[int, Any]:
    """Returns the layers that leave this stage."""
    return {
        each.layer: stage_module.function_of(module, each.layer) for each in moves if each.source == module.stage_id
    }


def _why_not(engine: Any, moves: Sequence[Move], optimizer: Any) -> str:
    """Returns why this rank cannot make these moves; "": it can."""
    module = engine.module
    if max(module._topo.get_dim("model"), 1) > 1:
        return "the topology has tensor parallelism"
    reason = optimizer.why_not() if moves else ""
    if reason:
        return f"the optimizer state of layers cannot be extracted: {reason}"
    for layer, function in going(module, moves).items():
        why = stage_module.why_pinned(module, layer) or engine.sluice.experts.why_not(engine.sluice, layer, function)
        if why:
            return why
    return ""


# ---- contents that move ----


def content_of(function: Any, kept: dict[nn.Parameter, Kept]) -> Content:
    """Returns the content of a layer with its optimizer states."""
    content = dict(stage_module.content_of(function))
    for name, parameter in function.named_parameters() if isinstance(function, nn.Module) else ():
        if parameter in kept:
            group, state = kept[parameter]
            content[f"{name} group"] = group
            content.update({f"{name} {_KEPT}{key}": value for key, value in state.items()})
    return content


def is_kept(name: str) -> bool:
    """Returns whether a member of a content is an optimizer state."""
    return f" {_KEPT}" in name


def _kept_of(function: Any, content: Content) -> dict[nn.Parameter, Kept]:
    """Returns the optimizer states in the content of an arriving layer."""
    found = {}
    for name, parameter in function.named_parameters() if isinstance(function, nn.Module) else ():
        if f"{name} group" in content:
            prefix = f"{name} {_KEPT}"
            state = {key[len(prefix) :]: value for key, value in content.items() if key.startswith(prefix)}
            found[parameter] = Kept(content[f"{name} group"], state)
    return found


def described(module: Any, moves: Sequence[Move], meeting: Meeting, pack: Callable[[int], Content]) -> list[Shipment]:
    """Returns the shipments of this rank's replica, described at source and target. Collective over all ranks. pack:
    returns the content of a leaving layer."""

    def packed() -> dict[int, Content]:
        return {layer: shipments.without_gaps(pack(layer)) for layer in going(module, moves)}

    contents = meeting.do("packing", packed)
    own = meeting.do("packing", lambda: {str(n): shipments.describe(content) for n, content in contents.items()})
    answers = meeting.tell(own)
    replica = module._grid.get_data_parallel_id()
    listed = []
    for layer, source, target in moves:
        first, last = (module._grid.stage_to_global(stage_id=stage, data=replica) for stage in (source, target))
        listed.append(Shipment(first, last, contents.get(layer), answers[first][str(layer)]))
    return listed


def _ranks() -> range:
    return range(torch.distributed.get_world_size())
