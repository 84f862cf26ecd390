# SPDX-License-Identifier: Apache-2.0
"""Defines command-line options that `sluice plan` and `sluice simulate` share."""

from __future__ import annotations

import argparse
from typing import Any

from .. import config, restore
from ..option_values import number_of_bytes
from . import machines
from .errors import BadInput
from .model import Model, read_configs, with_tokens
from .planner import ACTIVATIONS as PRICED
from .planner import DTYPES, FORMATS, Choice

ACTIVATIONS = ("identity", *(name for name in PRICED if name is not None))
# Options with the name of a field of Model.
_SAME = ("model_width", "hidden_width", "top_k", "layers", "tokens", "sequence_length", "dtype", "gated", "activation")
_SAME += ("lora_rank", "chunks")
WAYS: dict[str, bool | str] = {
    "none": False, "rank": True, "node": "node", "rank_or_node": "rank_or_node", "adaptive": "adaptive"
}  # fmt: skip


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe the layer or model."""
    group = parser.add_argument_group("model (flags win over config files)")
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="of transformers, DeepSpeed (AutoEP too) or Megatron (JSON, YAML, a script or a line with its flags); may "
        "be given twice",
    )
    group.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of a sample, if a config has a micro-batch"
    )
    group.add_argument("--model-width", type=int, metavar="M")
    group.add_argument("--hidden-width", type=int, metavar="H", help="of one expert")
    group.add_argument("--experts", type=int, metavar="E", help="of one layer, over all ranks")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--layers", type=int, metavar="L", help="MoE layers (1)")
    group.add_argument("--tokens", type=int, metavar="T", help="of one rank")
    group.add_argument("--gated", action=argparse.BooleanOptionalAction, default=None, help="experts of three matrices")
    group.add_argument("--dtype", choices=tuple(DTYPES), help="(bf16)")
    group.add_argument("--lora-rank", type=int, metavar="R", help="of the experts' adapters; 0: they are trained (0)")
    group.add_argument("--expert-format", choices=tuple(FORMATS), help="of frozen experts' weights (plain: --dtype)")
    group.add_argument(
        "--activation", metavar="NAME", help="of the experts; default: the config's, else priced as GELU"
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds --machine."""
    known = ", ".join(machines.names())
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"a file (docs/tuning.md), {machines.CACHED} (calibrated on this machine), or {known}; default: "
        "the machine in a --config of DeepSpeed",
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Adds the options that fix a part of the choice."""
    parser.add_argument("--chunks", type=int, metavar="n", help="fixed; default: chosen")
    parser.add_argument("--policy", choices=tuple(restore.SETS), help="fixed; default: chosen")
    parser.add_argument("--budget", metavar="BYTES", help='on each rank for all layers, such as "20GiB"')
    parser.add_argument(
        "--deduplicate",
        nargs="?",
        const="rank",
        choices=tuple(WAYS),
        help="how often a token's row is sent: once for each route (none), to each rank (rank), to each node and in "
        "it to each rank (node), the faster of these two, or as a run with this machine chooses (adaptive); default: "
        "adaptive; without a value: rank",
    )
    parser.add_argument("--host-budget", metavar="BYTES", help="of offloaded rows, all outstanding forwards together")


def model_of(options: Any) -> Model:
    """Reads the model. Flags override config files."""
    if options.chunks is not None and options.chunks < 1:
        raise BadInput(f"--chunks is {options.chunks}; it must be above 0, and is chosen where it is left out")
    if options.activation is not None and options.activation not in ACTIVATIONS:
        raise BadInput(f"--activation is {options.activation!r}; known are {', '.join(ACTIVATIONS)}")
    model = read_configs(options.config)
    flags = Model(
        **{name: getattr(options, name) for name in _SAME},
        num_experts=options.experts,
        weight_format=options.expert_format,
        memory_budget=budget_of(options.budget),
        host_memory_budget=budget_of(options.host_budget, "--host-budget"),
        deduplicate=None if options.deduplicate is None else WAYS[options.deduplicate],
        policy=None if options.policy is None else restore.SETS[options.policy],
    )
    model = with_tokens(flags.over(model))
    try:
        config.for_chunks(model.policy, model.chunks)  # the two may come from a config and from a flag
    except config.ConfigError as error:
        raise BadInput(str(error)) from None
    return model


def machine_of(options: Any, model: Model, ranks: int | None) -> machines.Machine:
    """Returns the machine that --machine names, else that of the tuner in a DeepSpeed config."""
    tuner = None if model.section is None else model.section.tuner
    name = options.machine
    if name is None and tuner is not None:
        name = tuner.machine or (machines.CACHED if tuner.calibrate is not None else None)
    if name is None:
        raise BadInput("--machine is missing: give it, or a DeepSpeed config whose tuner has a machine or calibrates")
    if name != machines.CACHED:
        return machines.load(name)
    folder = None if tuner is None else tuner.cache
    return machines.from_cache(folder, ranks, model.dtype or "bf16", model.model_width, model.hidden_width)


KEY_OF_BUDGET = '"sluice": "memory_budget"'


def budget_of(text: str | None, option: str = "--budget") -> int | None:
    """Returns the option's value in bytes."""
    if text is None:
        return None
    try:
        return number_of_bytes("memory_budget", int(text) if text.isdigit() else text)
    except config.ConfigError as error:
        raise BadInput(f"{option} {text}: {error.message.replace(KEY_OF_BUDGET, 'it')}") from error


def wanted_of(model: Model) -> Choice:
    """Returns the parts of the choice that the model fixes."""
    return Choice(model.chunks or 0, *(model.policy or (None, None)), model.wgrad_mode)
