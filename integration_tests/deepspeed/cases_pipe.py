# SPDX-License-Identifier: Apache-2.0
"""Rank-side: DeepSpeed's pipeline engines, run by the host's schedule and by the library."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import ds_models
import pipe_models as models
import sluice
import torch
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe import p2p
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.errors import InvalidArgument

MICRO_BATCHES = 4


def _bits(values: Any) -> str:
    """Returns a digest of all tensors and numbers in nested containers."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            digest.update(f"{plain.dtype}{list(plain.shape)}".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                digest.update(str(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, (int, float, str, bool)) or value is None:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()


@contextlib.contextmanager
def _messages_counted() -> Iterator[list[int]]:
    """Counts the messages that the host's own point-to-point calls send and receive."""
    count = [0]

    def counted(stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return stock(*args, **kwargs)

        return call

    with patch.multiple(p2p, send=counted(p2p.send), recv=counted(p2p.recv)):
        yield count


class Job:
    """One engine and its batches."""

    def __init__(
        self,
        kind: str,
        stages: int,
        pipeline: dict[str, Any] | None,
        dtype: str = "float32",
        config: dict[str, Any] | None = None,
        module: dict[str, Any] | None = None,
        varied: bool = False,
        section: dict[str, Any] | None = None,
        net: Any = None,
        parts: Any = None,
        is_filtered: bool = True,
    ) -> None:
        """is_filtered: the optimizer gets only the trainable parameters."""
        self.kind, self.stages, self.varied = kind, stages, varied
        self.dtype = getattr(torch, dtype)
        net = models.module(kind, stages, parts, **(module or {})) if net is None else net
        values = {
            **ds_models.ds_config(gradient_accumulation_steps=MICRO_BATCHES),
            "train_micro_batch_size_per_gpu": models.ROWS,
            **({} if dtype == "float32" else {"bf16": {"enabled": True}}),
            **(config or {}),
        }
        if pipeline is not None or section is not None:
            stages_section = {} if pipeline is None else {"pipeline": pipeline}
            values["sluice"] = {"enabled": True, "timeout": 60, **stages_section, **(section or {})}
        parameters = [each for each in net.parameters() if each.requires_grad or not is_filtered]
        self.engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=values)

    def data(self, step: int, count: int = MICRO_BATCHES) -> Any:
        """Returns an iterator for one batch."""
        return models.batches(self.kind, self.stages, count, step, self.dtype, self.varied)

    def train(self, steps: range) -> list[float]:
        """Trains these steps; returns their losses."""
        return [float(self.engine.train_batch(self.data(step))) for step in steps]

    def evaluate(self, step: int, count: int = MICRO_BATCHES) -> Any:
        """Loss and logits of one batch. Every rank has the loss."""
        found = self.engine.eval_batch(self.data(step, count), return_logits=True, num_micro_batches=count)
        return [None if value is None else _bits(value) for value in found]

    def state(self) -> dict[str, str]:
        """Digests of parameters and optimizer state."""
        return {
            "parameters": _bits(dict(self.engine.module.named_parameters())),
            "optimizer": _bits(self.engine.optimizer.state_dict()),
        }

    def end(self) -> None:
        """Releases the engine, so that the process can make others."""
        if hasattr(self.engine, "sluice"):
            self.engine.sluice.unswap()
        self.engine.destroy()


def unclipped(pipeline: dict[str, Any] | None, **job: Any) -> Job:
    """Returns a job without gradient clipping, by default: the order of its sums depends on the stages' layers."""
    return Job(pipeline=pipeline, **{**job, "config": {"gradient_clipping": 0.0, **job.get("config", {})}})


def trained(
    steps: int,
    pipeline: dict[str, Any] | None,
    before: Callable[[Job, int], None] = lambda made, step: None,
    at_end: Callable[[Job], dict[str, Any]] = lambda made: {},
    evaluated: Sequence[int] = (MICRO_BATCHES,),
    make: Callable[..., Job] = unclipped,
    **job: Any,
) -> dict[str, Any]:
    """Trains one side, and returns values for the comparison with another. Layers that have moved are home at the end.

    before: called before each step. at_end: called after the evaluations, of these numbers of micro-batches; its values
    are returned too. "been": the partitions, at first and after each step
    """
    made = make(pipeline=pipeline, **job)
    found: dict[str, Any] = {"losses": [], "been": [list(stage_module.parts_of(made.engine.module))]}
    torch.manual_seed(5)
    with _messages_counted() as count:
        for step in range(steps):
            before(made, step)
            found["losses"] += made.train(range(step, step + 1))
            found["been"].append(list(stage_module.parts_of(made.engine.module)))
        found["evaluations"] = [made.evaluate(100, each) for each in evaluated]
    found |= {"messages": count[0], "random": _bits(torch.random.get_rng_state()), **at_end(made)}
    if pipeline is not None:
        found["stats"] = made.engine.sluice.pipeline.stats()
        if found["been"][-1] != found["been"][0]:
            made.engine.sluice.move_layers(found["been"][0])
    found |= made.state()
    made.end()
    return found


def parity(steps: int, pipeline: dict[str, Any], **job: Any) -> list[dict[str, Any]]:
    """Returns [stock, through Sluice]."""
    return [trained(steps, each, make=Job, **job) for each in (None, pipeline)]


def is_trained(**job: Any) -> bool:
    """Returns whether the first batch of stock DeepSpeed gives the optimizer of this stage gradients."""
    made = unclipped(None, **job)
    made.train(range(1))
    states = made.engine.optimizer.optimizer.state.values()
    found = any(bool(state["exp_avg"].any()) for state in states)
    made.end()
    return found


def monitored(folder: str) -> list[list[str]]:
    """Returns the files of the host's monitor on rank 0: [stock, through Sluice]."""
    found = []
    for name, pipeline in (("stock", None), ("ours", {})):
        output = Path(folder) / name
        monitor = {"enabled": True, "output_path": str(output), "job_name": "job"}
        made = Job("plain", torch.distributed.get_world_size(), pipeline, config={"csv_monitor": monitor})
        made.train(range(3))
        made.evaluate(100)
        made.end()
        files = sorted(output.rglob("*.csv"))
        found.append([f"{file.name}\n{file.read_text()}" for file in files])
    return found


def alone(steps: int, pipeline: dict[str, Any], **job: Any) -> dict[str, Any]:
    """Returns the results of training through Sluice, and of the same layers in one process with plain torch."""
    found = trained(steps, pipeline, make=Job, **job)
    return {**found, "torch": _in_one_process(steps, job["kind"])}


def _in_one_process(steps: int, kind: str) -> list[float]:
    """Returns losses of the whole model, micro-batch by micro-batch, on this rank only."""
    torch.manual_seed(0)
    layers = []
    for index, spec in enumerate(models._layers(kind)):
        torch.manual_seed(1234 + index)  # as a PipelineModule with seed_layers builds them
        layers.append(spec.build())
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    world = torch.distributed.get_world_size()
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for x, target in models.batches(kind, world, MICRO_BATCHES, step, torch.float32):
            for layer in layers:
                x = layer(x)
            each = models.loss(x, target)
            (each / MICRO_BATCHES).backward()
            total += each.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / MICRO_BATCHES))
    return losses


# ---- MoE layers in the stages ----


def with_experts(steps: int, section: dict[str, Any] | None, **job: Any) -> dict[str, Any]:
    """Trains a pipe of the kind "moe" by stock (without a section) or through Sluice, whose section may have no
    "pipeline". Returns also norms of the parameters, the most outstanding forwards of the first MoE layer, and what is
    said of the MoE layers."""
    outstanding = {"now": 0, "most": 0}
    options = None if section is None else {"chunks": 2, **section}
    pipeline = None if options is None else options.pop("pipeline", None)

    def before(made: Job, step: int) -> None:
        if step == 0:
            _watch_outstanding(made.engine.module, outstanding)

    def at_end(made: Job) -> dict[str, Any]:
        found = {name: float(tensor.detach().double().norm()) for name, tensor in made.engine.module.named_parameters()}
        return {"norms": found, "most_outstanding": outstanding["most"], **_said_of_experts(made.engine)}

    return trained(steps, pipeline, before, at_end, (), Job, kind="moe", section=options, **job)


def parity_with_experts(steps: int, section: dict[str, Any], **job: Any) -> list[dict[str, Any]]:
    """Returns [stock, through Sluice]. A stage without experts makes no expert groups, and torch counts groups on each
    rank separately: with such a stage a process cannot make a second engine, also with stock."""
    return [with_experts(steps, each, **job) for each in (None, section)]


def _said_of_experts(engine: Any) -> dict[str, Any]:
    kinds = [type(each).__name__ for each in engine.module.modules() if isinstance(each, MOELayer)]
    if not hasattr(engine, "sluice"):
        return {"kinds": kinds}
    stats = engine.sluice.stats()

    def asked(given: Any) -> Any:
        """Returns the output of `sluice.stats`, or the text of an error, because the other stages continue."""
        try:
            sluice.decisions(given)
            return sluice.stats(given)
        except InvalidArgument as error:
            return error.message

    return {
        "kinds": kinds,
        "asked": [asked(given) == stats for given in (engine, engine.module)],
        "computed_by": [each["computed_by"] for each in stats["layers"]],
        "plans": [each.get("plan") for each in stats["layers"]],
        "peak_bytes": max((each["peak_bytes"] for each in stats["contexts"]), default=0),
    }


def _watch_outstanding(module: Any, seen: dict[str, int]) -> None:
    """Counts the outstanding forwards of the first MoE layer of `module`, now and at most."""

    def entered(_module: Any, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        seen["now"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        left: list[None] = []  # the hook runs when the backward begins, and again if the graph is walked again

        def leaves(_gradient: torch.Tensor) -> None:
            seen["now"] -= not left
            left.append(None)

        output.register_hook(leaves)

    for each in module.modules():
        if isinstance(each, MOELayer):
            each.register_forward_hook(entered)
            break
