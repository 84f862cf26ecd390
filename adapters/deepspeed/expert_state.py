"""What an optimizer keeps of an expert's parameters, whichever optimizer DeepSpeed trains with: how to read all of it,
and how to put it into another expert's place. One table for each kind, chosen when experts move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from torch import nn

Content = dict[str, Any]  # tensors and numbers by name


class Keeper(Protocol):
    """Reads and writes what is kept of one parameter, beside its value."""

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        """Why something of these parameters could not be moved now; "": nothing is in the way."""
        ...

    def bytes_of(self, parameter: nn.Parameter) -> int:
        """Of what `read` would give."""
        ...

    def read(self, parameter: nn.Parameter) -> Content:
        """Copies. Collective over the ranks that hold parts of it."""
        ...

    def write(self, parameter: nn.Parameter, content: Content) -> None:
        """Into the optimizer's own tensors where there are any."""
        ...


class Nothing:
    """No optimizer: a gradient alone."""

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        """See Keeper."""
        return ""

    def bytes_of(self, parameter: nn.Parameter) -> int:
        """See Keeper."""
        return 0 if parameter.grad is None else _bytes(parameter.grad)

    def read(self, parameter: nn.Parameter) -> Content:
        """See Keeper."""
        return {} if parameter.grad is None else {"grad": parameter.grad.detach().clone()}

    def write(self, parameter: nn.Parameter, content: Content) -> None:
        """See Keeper."""
        grad = content.get("grad")
        if grad is None or parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.copy_(grad)


class Plain(Nothing):
    """An optimizer of torch whose `state` is by parameter: ZeRO stage 0 with float32 parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = optimizer.state

    def bytes_of(self, parameter: nn.Parameter) -> int:
        """See Keeper."""
        kept = [value for value in self._state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
        return super().bytes_of(parameter) + sum(map(_bytes, kept))

    def read(self, parameter: nn.Parameter) -> Content:
        """See Keeper."""
        content = super().read(parameter)
        for key, value in self._state.get(parameter, {}).items():
            content[f"state {key}"] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return content

    def write(self, parameter: nn.Parameter, content: Content) -> None:
        """See Keeper."""
        super().write(parameter, content)
        if not parameter.requires_grad:
            return
        prefix = "state "
        kept = {key[len(prefix) :]: value for key, value in content.items() if key.startswith(prefix)}
        if kept:
            self._state[parameter] = kept
        else:
            self._state.pop(parameter, None)


class Mastered(Plain):
    """Each parameter of 16 bits has a master of its own, and the `state` is by master: DeepSpeed's unfused optimizer,
    which 16-bit experts have without ZeRO."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.optimizer)
        lists = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        self._masters = {id(p): master for own, masters in lists for p, master in zip(own, masters)}

    def bytes_of(self, parameter: nn.Parameter) -> int:
        """See Keeper."""
        master = self._masters.get(id(parameter))
        own = Nothing.bytes_of(self, parameter)
        return own if master is None else own + _bytes(master) + super().bytes_of(master)

    def read(self, parameter: nn.Parameter) -> Content:
        """See Keeper."""
        content, master = Nothing.read(self, parameter), self._masters.get(id(parameter))
        if master is not None:
            kept = {key: value for key, value in super().read(master).items() if key != "grad"}
            content.update(kept, master=master.detach().clone())
        return content

    def write(self, parameter: nn.Parameter, content: Content) -> None:
        """See Keeper."""
        Nothing.write(self, parameter, content)
        master = self._masters.get(id(parameter))
        if master is None:
            return
        if "master" in content:
            master.data.copy_(content["master"])
        super().write(master, {key: value for key, value in content.items() if key.startswith("state ")})

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it has a master of each."""
        return all(id(parameter) in self._masters for parameter in parameters)


class Partitioned:
    """Masters and moments lie in flat buffers, each of which is cut over the ranks with replicas of the expert: ZeRO
    stages 1 and 2, and the bf16 optimizer. What is counted by buffer and not by parameter (steps) is alike on all
    ranks, since all buffers take every step. Gradients are in flat buffers too, and nothing moves while there are
    any."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._keys = sorted(
            {
                key
                for flat, kept in optimizer.optimizer.state.items()
                for key, value in kept.items()
                if isinstance(value, torch.Tensor) and value.shape == flat.shape
            }
        )

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        """See Keeper."""
        held = [getattr(self._optimizer, buffers, {}) for buffers in ("averaged_gradients", "all_grad_tensors")]
        has_any = any(value is not None for buffers in held for value in buffers.values())
        has_any |= any(any(flags) for flags in getattr(self._optimizer, "fp32_groups_has_gradients", ()))
        if has_any or any(parameter.grad is not None for parameter in parameters):
            return (
                f"{type(self._optimizer).__name__} has gradients: move behind engine.step(), before the next backward"
            )
        return ""

    def bytes_of(self, parameter: nn.Parameter) -> int:
        """See Keeper."""
        return parameter.numel() * 4 * (1 + len(self._keys)) if parameter.requires_grad else 0

    def read(self, parameter: nn.Parameter) -> Content:
        """See Keeper."""
        if not parameter.requires_grad:
            return {}
        content = {"master": self._whole(parameter, None)}
        for key in self._keys:
            content[f"state {key}"] = self._whole(parameter, key)
        return content

    def write(self, parameter: nn.Parameter, content: Content) -> None:
        """See Keeper."""
        for key in (None, *self._keys):
            value = content.get("master" if key is None else f"state {key}")
            part = None if value is None else self._part(parameter, key)
            if part is not None:
                start, own = part
                own.copy_(value.view(-1).narrow(0, start, own.numel()))

    def _part(self, parameter: nn.Parameter, key: str | None) -> tuple[int, torch.Tensor] | None:
        """Where this rank's part of a parameter begins in it, and the part of its master (key None) or of a moment, as
        a view; None: this rank has none. DeepSpeed's own views of moments are made when there are none yet."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        start = mapping.lp_fragment_address.start
        if key is None:
            return start, mapping.hp_fragment
        base = self._optimizer.optimizer
        flat = base.param_groups[mapping.param_group_index]["params"][0]
        where = mapping.hp_fragment_address
        return start, base.state[flat][key].narrow(0, where.start, where.numel)

    def _whole(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        part = self._part(parameter, key)
        if part is not None:
            start, own = part
            whole.narrow(0, start, own.numel()).copy_(own)
        dist.all_reduce(whole, group=parameter._dp_group)  # type: ignore[attr-defined]
        return whole


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def keeper_of(name: str, experts: Sequence[nn.Module], optimizer: Any) -> Keeper:
    """By what the optimizer can do. UnsupportedError where it keeps things of experts nobody knows where."""
    if optimizer is None:
        return Nothing()
    trained = [p for expert in experts for p in expert.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, torch.optim.Optimizer) and {id(p) for p in trained} <= held:
        return Plain(optimizer)
    base = getattr(optimizer, "optimizer", None)
    if isinstance(base, torch.optim.Optimizer) and hasattr(optimizer, "fp16_groups"):
        mastered = Mastered(optimizer)
        if mastered.holds(trained):
            return mastered
    has_parts = all(hasattr(p, "_hp_mapping") for p in trained)
    if has_parts and isinstance(base, torch.optim.Optimizer):
        return Partitioned(optimizer)
    raise UnsupportedError(
        f"MoE layer '{name}': experts cannot move under {type(optimizer).__name__}, which keeps copies or moments of "
        "parameters where they are not found: use ZeRO stage 0 with float32 parameters, stage 1 or 2, or bf16"
    )
