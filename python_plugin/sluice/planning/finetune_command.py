# SPDX-License-Identifier: Apache-2.0
"""`sluice plan --finetune`: predicts memory of each rank and speed of fine-tuning a whole model with LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import architecture, arguments, command, files, finetune, machines
from .errors import BadInput
from .finetune import Preview, Recipe
from .model import layers_of
from .planner import FORMATS, Planner, size, words_of_error

MACHINE = "cpu-1x-10g"
QUANTISED = {"mxfp4": "mxfp4", "fp8": "fp8"}  # formats of checkpoints, by transformers' quant_method
EXAMPLE = f"""examples:
  sluice plan --finetune config.json --ranks 4 --memory 256GiB
  sluice plan --finetune config.json --ranks 2 --memory 64GiB --expert-format mxfp4 --tokens 2048 --checkpoint
  sluice plan --finetune gpt-oss-20b/config.json --memory 32GiB --lora-rank 8 --targets attention

formats: bf16 and f32 are plain weights; the others are frozen codes with scales. A checkpoint in MXFP4 or FP8 is taken
as it is. Without --machine seconds are those of {MACHINE} (docs/tools.md), an assumption: name a calibrated machine.

exit status: 0 it fits; 1 it does not; 2 wrong arguments or files
"""


@command.refuses("sluice plan")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice plan --finetune", __doc__, EXAMPLE)
    parser.add_argument("--finetune", required=True, metavar="CONFIG", help="the config.json of a transformers model")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="W", help="ranks that share the experts and dense weights (1)"
    )
    parser.add_argument("--memory", required=True, metavar="BYTES", help="of each rank")
    parser.add_argument("--tokens", type=int, default=1024, metavar="T", help="of a rank in a step (1024)")
    parser.add_argument("--lora-rank", type=int, default=16, metavar="R", help="of all adapters (16)")
    parser.add_argument(
        "--targets", default="attention,experts", metavar="NAMES", help="of linear layers; attention; experts (both)"
    )
    formats = ("bf16", "f32", *(name for name in FORMATS if name != "plain"))
    parser.add_argument("--expert-format", choices=formats, help="of the experts' weights; default: the checkpoint's")
    parser.add_argument("--dtype", choices=("bf16", "f32"), help="of dense weights and of rows; default: the config's")
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing of each decoder layer")
    parser.add_argument("--keep-dense", action="store_true", help="dense weights stay gathered (no resharding)")
    parser.add_argument(
        "--skew", type=float, default=1.0, help="rows of the most loaded rank / rows of balanced routing (1)"
    )
    parser.add_argument("--machine", metavar="NAME|FILE", default=MACHINE, help=f"({MACHINE})")
    options = command.parsed(parser, words)
    for name in ("ranks", "tokens", "lora_rank"):
        if getattr(options, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    planner = Planner(machines.load(options.machine))
    made = finetune.preview(planner, _recipe(options))
    return command.answer(options.json, lambda: as_dict(made, planner), lambda: lines_of(made, planner), made.fits)


def _recipe(options: Any) -> Recipe:
    path = options.finetune
    data = files.from_json(f"--finetune {path}: ", files.read(f"--finetune {path}", path))
    if not isinstance(data, Mapping):
        raise BadInput(f"--finetune {path}: it must be an object, not {type(data).__name__}")
    try:
        described = layers_of(data, path)
        dtype, weight_format = _formats(options, data, described.dtype or "bf16")
        decoder = architecture.read(data, dtype)
    except BadInput as error:
        raise BadInput(f"--finetune {path}: {error.message}") from None
    memory = arguments.budget_of(options.memory, "--memory")
    assert memory is not None
    return Recipe(
        decoder,
        options.ranks,
        memory,
        options.tokens,
        options.lora_rank,
        finetune.targets_of(options.targets, decoder),
        weight_format,
        options.checkpoint,
        options.keep_dense,
        described.activation,
        options.skew,
    )


def _formats(options: Any, data: Mapping[str, Any], own: str) -> tuple[str, str]:
    """Returns (dtype of dense weights and of rows, format of the experts)."""
    dtype, wanted = options.dtype or own, options.expert_format
    if wanted in ("bf16", "f32"):
        if wanted != dtype:
            raise BadInput(
                f"--expert-format {wanted}: plain experts have the dtype of the rest, {dtype}: give --dtype {wanted}"
            )
        return dtype, "plain"
    if wanted is not None:
        return dtype, wanted
    quantised = data.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method is None:
        return dtype, "plain"
    if method not in QUANTISED:
        known = ", ".join(QUANTISED)
        raise BadInput(f"quantization_config.quant_method is {method!r}; known are {known}: give --expert-format")
    return dtype, QUANTISED[method]


def lines_of(made: Preview, planner: Planner) -> list[str]:
    """Returns the lines for a terminal."""
    recipe, decoder = made.recipe, made.recipe.decoder
    experts = decoder.dtype if recipe.weight_format == "plain" else recipe.weight_format
    lines = [
        f"{decoder.family}: {len(decoder.blocks)} layers, {len(decoder.moe_blocks)} with experts; experts in "
        f"{experts}, the rest in {decoder.dtype}",
        f"LoRA of rank {recipe.lora_rank} on {', '.join(recipe.targets)}: {made.trained:,} parameters are trained",
        f"{recipe.ranks} ranks of {size(recipe.memory)}, {recipe.tokens} tokens on each in a step",
        "",
    ]
    rows = [(name, f"{value:,}", size(value)) for name, value in made.bytes.items() if value]
    rows.append(("in all", f"{made.total:,}", size(made.total)))
    lines += command.table({"bytes on each rank": "<20", "": ">20", " ": ">11"}, rows)
    if not made.fits:
        lines += ["", f"DOES NOT FIT: {size(made.total - recipe.memory)} more than --memory. What to change:"]
        return lines + [f"  {each}" for each in made.advice]
    spread = ", ".join(f"{name} {value:.3g}" for name, value in made.seconds.items())
    lines += ["", f"fits, with {size(recipe.memory - made.total)} to spare; set memory_budget to {made.context_bytes}"]
    lines += [f"experts run with {made.choice}"]
    lines += [
        f"predicted: {made.tokens_per_second:,.0f} tokens/s on {planner.machine.name} (seconds of a step: {spread})"
    ]
    return [*lines, words_of_error(*made.errors)]


def as_dict(made: Preview, planner: Planner) -> dict[str, Any]:
    """Returns what --json prints."""
    recipe = made.recipe
    return {
        "form": 1,
        "machine": planner.machine.name,
        "family": recipe.decoder.family,
        "ranks": recipe.ranks,
        "memory": recipe.memory,
        "tokens": recipe.tokens,
        "lora_rank": recipe.lora_rank,
        "targets": list(recipe.targets),
        "expert_format": recipe.weight_format,
        "dtype": recipe.decoder.dtype,
        "trained": made.trained,
        "bytes": made.bytes,
        "total_bytes": made.total,
        "fits": made.fits,
        "seconds": made.seconds,
        "tokens_per_second": made.tokens_per_second,
        "choice": None if made.choice is None else {**asdict(made.choice), "policy": made.choice.policy},
        "memory_budget": made.context_bytes if made.fits else None,
        "advice": list(made.advice),
    }
