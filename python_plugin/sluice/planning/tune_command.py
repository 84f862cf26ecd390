# SPDX-License-Identifier: Apache-2.0
"""`sluice tune`: calibrates this machine once, and makes the tuner's decisions for a model ahead of time."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .. import decision_cache, decision_log
from .._library import load
from ..config import Options, TunerOptions
from ..errors import OverBudget, SluiceError
from ..options import ContextOptions
from . import arguments, command, files
from .errors import BadInput
from .machines import Machine
from .model import HELD, Model, complete
from .plan_command import as_dict, lines_of, plan
from .planner import DTYPES, Planner

EXAMPLE = """examples:
  sluice tune --model-width 1024 --hidden-width 4096 --dtype f32 --out machine.json
  torchrun --nproc-per-node 2 -m sluice tune --model-width 1024 --hidden-width 4096 --dtype f32 --out machine.json \\
           --experts 8 --top-k 2 --tokens 4096 --budget 500MB
  torchrun --nproc-per-node 2 -m sluice tune --config ds_config.json --config config.json --tokens 4096 --keep

Under torchrun (or any launcher that sets RANK and WORLD_SIZE) all ranks take part and exchanges are measured; alone,
only what one rank can do. What was measured before for this device, link, width and library comes from the cache.
With --keep one layer of the model then trains on made-up rows until its tuner has decided, and the decision goes to
the file that runs with "tuner": {"decisions": true} (or a path) begin with; it takes a layer's memory, with gradients.

exit status: 0 measured (and the model, if one is given, fits); 1 it does not fit, or --keep had nothing to keep;
2 wrong arguments; 3 not measured
"""
_INFO = 2


def main(words: list[str]) -> int:
    """Runs the command and returns its exit status. Only rank 0 prints."""
    options = command.parsed(_parser(), words)
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        model, place = _asked(options, first)
    except SluiceError as error:
        return _complain(error, 2) if first else 2
    try:
        with _context(model, options, place is not None) as (context, handle, ranks):
            machine = calibrate(handle, model.model_width, model.hidden_width, model.dtype or "bf16", options, first)
            kept = None
            if place is not None:
                kept = _decide(context, model, options, place, first)
    except (SluiceError, RuntimeError, ImportError) as error:
        return _complain(f"not measured: {error}", 3)
    if not first:
        return 0
    planner = Planner(machine)
    try:
        files.write("--out", options.out, json.dumps(machine.data, indent=1) + "\n")
        made = _planned(planner, model, options, ranks) if _wants_plan(model, options) else None
    except SluiceError as error:
        return _complain(error, 2)
    _print(machine, planner, made, kept, options)
    fits = made is None or all(row["decision"].chosen for row in made["layers"])
    return 0 if fits and (place is None or kept) else 1


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("sluice tune", __doc__, EXAMPLE)
    arguments.add_model(parser)
    arguments.add_choice(parser)
    parser.add_argument("--out", default="machine.json", metavar="FILE", help="for --machine (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="approximate time of the measurement (%(default)s)")
    parser.add_argument(
        "--keep",
        nargs="?",
        const=True,
        metavar="FILE",
        help="decide with steps of a layer, and write the decision to FILE; default: the file of the config's "
        '"decisions", or one in the cache folder',
    )
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None, help="experts have biases")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="at most, for --keep (%(default)s)")
    parser.add_argument("--refresh", action="store_true", help="measure again, even if the cache has a result")
    parser.add_argument("--cache-dir", metavar="DIR", help='default: SLUICE_CACHE_DIR, or in the home folder; "": none')
    parser.add_argument("--verbose", action="store_true", help="also print which GEMMs are used for which sizes")
    return parser


def _complain(what: Exception | str, status: int) -> int:
    print(f"sluice tune: {what}", file=sys.stderr)
    return status


def _wants_plan(model: Model, options: Any) -> bool:
    return model.num_experts is not None or model.tokens is not None or options.keep is not None


def _asked(options: Any, first: bool) -> tuple[Model, str | bool | None]:
    """Returns the checked model, and where to store decisions."""
    model = Model(bias=options.bias).over(arguments.model_of(options))
    for name, value in (("--model-width", model.model_width), ("--hidden-width", model.hidden_width)):
        if value is None:
            raise BadInput(f"{name} is missing: give it, or a --config that holds it")
        if value < 1:
            raise BadInput(f"{name} is {value}; it must be above 0")
    if not 0.05 <= options.seconds <= 3600:
        raise BadInput(f"--seconds is {options.seconds:g}; it must be in [0.05, 3600]")
    if first:
        files.check("--out", options.out)
    if _wants_plan(model, options):
        model = complete(model)
    return model, _place(options, model)


def _planned(planner: Planner, model: Model, options: Any, ranks: int) -> dict[str, Any]:
    options.ranks, options.skew = ranks, 1.0
    options.routing = options.outstanding = options.picture = None
    return plan(planner, model, options)


def _print(machine: Machine, planner: Planner, made: Any, kept: dict[str, Any] | None, options: Any) -> None:
    if options.json:
        planned = as_dict(made, planner) if made else None
        print(json.dumps({"form": 1, "machine": machine.data, "plan": planned, "kept": kept}, indent=1))
        return
    print("\n".join(said(machine, options.out)))
    if made:
        print("\n".join(["", *lines_of(made, planner, False)]))
    if kept:
        print("\n".join(["", *kept_lines(kept)]))


def _place(options: Any, model: Model) -> str | bool | None:
    """Returns where to store decisions. None: nowhere; True: the cache folder."""
    if options.keep is None:
        return None
    try:
        importlib.import_module("sluice.adapters.torch.layer")
    except ImportError as error:
        raise BadInput(f"--keep decides by steps of a layer, which needs torch: {error}") from error
    if options.steps < 1:
        raise BadInput(f"--steps is {options.steps}; it must be above 0")
    _check_keep(model, int(os.environ.get("WORLD_SIZE", "1")))
    tuner = None if model.section is None else model.section.tuner
    named = options.keep if isinstance(options.keep, str) else (tuner and tuner.decisions) or True
    if options.cache_dir is None and tuner is not None:
        options.cache_dir = tuner.cache
    if options.cache_dir == "" and named is True:
        raise BadInput('--keep: --cache-dir is "", so there is no folder to keep decisions in: name a file')
    path = decision_cache.place(named, options.cache_dir)
    try:
        decision_cache.check_ours(path)
    except OSError as error:
        raise BadInput(f"--keep: {path}: {error.strerror}") from error
    return named


def _decide(context: Any, model: Model, options: Any, place: str | bool, first: bool) -> dict[str, Any] | None:
    """Trains until the tuner has decided. Returns what was stored, on the first rank. None if the steps led to no
    decision, or if no plan fits the budget, as the printed error explains.
    """
    try:
        steps = _settle(context, model, options.steps, command.progress if first else lambda text: None)
    except OverBudget as error:
        if first:
            print(f"sluice tune: nothing kept: {error}", file=sys.stderr)
        return None
    if not context.decisions():
        if first:
            print(f"sluice tune: nothing kept: undecided after {steps} steps; allow more: --steps", file=sys.stderr)
        return None
    return {"steps": steps, **_keep(context, place, options.cache_dir)} if first else None


@contextmanager
def _context(model: Model, options: Any, decides: bool) -> Iterator[tuple[Any, Any, int]]:
    """Yields (a context over all ranks of the launcher or None, its handle, number of ranks), with torch's group.

    decides: the context has the GEMMs, transport and budgets of the run, and a tuner with this machine.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    library = load()
    if ranks > 1 or decides:
        from ..adapters.torch.context import Context
        from ..adapters.torch.group import EpGroup

        if ranks > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo")
        made = ContextOptions()
        run = options_of(model)
        if decides:
            tuner = TunerOptions(calibrate=options.seconds, cache=options.cache_dir)
            outstanding = model.max_outstanding or model.layers
            made = replace(run, max_outstanding=outstanding, tuner=tuner)
        group = EpGroup.for_ranks(range(ranks) if ranks > 1 else None, transport=run.transport)
        context = Context(group, made)
        try:
            yield context, context.handle, ranks
        finally:
            context.close()
            if ranks > 1:
                dist.destroy_process_group()
        return
    out = library.ffi.new("sluice_context_t **")
    library.check(library.lib.sluice_context_create(library.new("context_config"), library.ffi.NULL, out))
    try:
        yield None, out[0], 1
    finally:
        library.lib.sluice_context_destroy(out[0])


def calibrate(context: Any, model_width: int, hidden_width: int, dtype: str, options: Any, speaks: bool) -> Machine:
    """Calibrates the machine. Collective. speaks: this rank prints progress to stderr."""
    library = load()
    ffi, lib = library.ffi, library.lib
    config = library.new("calibration_config")
    config.model_width, config.hidden_width, config.dtype = model_width, hidden_width, DTYPES[dtype]
    config.seconds, config.refresh = options.seconds, int(options.refresh)
    if options.cache_dir is not None:
        folder = ffi.new("char[]", options.cache_dir.encode())
        config.cache_dir = folder

    @ffi.callback("void(void *, int32_t, const char *)")
    def tell(user: Any, level: int, message: Any) -> None:
        text = ffi.string(message).decode(errors="replace")
        if text.startswith("calibrat") or level < _INFO or options.verbose:
            print(f"sluice tune: {text}", file=sys.stderr, flush=True)

    if speaks:
        lib.sluice_set_log(tell, ffi.NULL, _INFO)
    out = ffi.new("sluice_planner_t **")
    try:
        library.check(lib.sluice_planner_calibrate(context, config, out))
    finally:
        if speaks:
            lib.sluice_set_log(ffi.NULL, ffi.NULL, 0)
    handle = ffi.gc(out[0], lib.sluice_planner_destroy)
    return Machine(json.loads(library.text(lib.sluice_planner_write_machine, handle)), {})


def said(machine: Machine, path: str) -> list[str]:
    """Returns lines with the main results of a calibration."""
    data = machine.data
    lines = [f"machine {machine.name} -> {path} (sluice plan --machine {path} ...)"]
    for dtype, forms in data.get("gemm", {}).items():
        points = _points(forms.get("forward")) if isinstance(forms, dict) else []
        if points:
            fastest = max(1 / seconds for _, seconds in points if seconds > 0)
            lines.append(f"  GEMMs {dtype}: to {fastest / 1e9:.4g} GFLOP/s, to {points[-1][0]:g} rows per expert")
    for name in ("exchange", "host_copy", "rows"):
        points = _points(data.get(name))
        if points and points[-1][1] > 0:
            lines.append(f"  {name}: {points[-1][0] / points[-1][1] / 1e9:.4g} GB/s at {points[-1][0]:.3g} bytes")
    late, taken = _points(data.get("exchange_contention")), _points(data.get("compute_contention"))
    if late and taken:
        size, more = late[0]
        lines.append(
            f"  small exchanges ({size:g} bytes): {1e3 * data['exchange'].get('startup_seconds', 0):.3g} ms alone, "
            f"{1e3 * more:.3g} ms more during GEMMs, which lose {1e3 * taken[0][1]:.3g} ms"
        )
    if data.get("share"):
        shares = [*lines_of_alphas(alphas(data)), *lines_by_copy(data)]
        lines += [f"  {line}" for line in shares]
    error = data.get("error", {})
    if error.get("count"):
        worst = f"90th percentile {100 * error['p90']:.1f} %"
        lines.append(f"  error on {error['count']} sizes held out: median {100 * error['median']:.1f} %, {worst}")
    return lines


def kept_lines(kept: dict[str, Any]) -> list[str]:
    """Returns lines with the decisions and where they are stored."""
    lines = [f"decided in {kept['steps']} steps of one layer, kept in {kept['path']}:"]
    return lines + [f"  {decision_log.line({'when': 'now', **entry})}" for entry in kept["decisions"][-1:]]


def _points(curve: Any) -> list[list[float]]:
    found = curve.get("points", []) if isinstance(curve, dict) else curve
    return found if isinstance(found, list) else []


# ---- alpha(y, x) and alpha(y, all): the share of speed that y keeps while x, or all, run [MPMoE Fig. 3] ----

STREAMS = {"comm": "comm", "comp": "compute", "mem": "copy_out"}  # the papers' names, and our lanes
FEASIBLE = 0.5  # overlap pays if communication and computation each keep more than this [MPMoE II-C]


COPIES = {"copy_out": "out", "copy_in": "in"}  # the lanes of copies, and their directions


def sizes(machine: Mapping[str, Any]) -> list[float]:
    """Returns the sizes of copies in bytes with which shares were measured, ascending. Empty for older files."""
    return sorted({float(one["bytes"]) for one in machine.get("copy_share", [])})


def alphas(
    machine: Mapping[str, Any], copies: str = "copy_out", size: float | None = None
) -> dict[tuple[str, str], float]:
    """Returns the factors by (y, x) in the papers' names; x is a stream or "all". 1: x does not slow y, or not known.

    For exchanges and computation, a calibration measures contention by size instead (docs/tuning.md). copies: the lane
    of copies; size: one of sizes(), by default the largest.
    """
    measured = sizes(machine)
    size = measured[-1] if measured and size is None else size
    told = [*machine.get("share", []), *(one for one in machine.get("copy_share", []) if one["bytes"] == size)]
    table = {(one["lane"], frozenset(one["beside"])): float(one["share"]) for one in told}
    found = {}
    streams = STREAMS | {"mem": copies}
    for y, lane in streams.items():
        others = {x: name for x, name in streams.items() if x != y}
        for x, name in others.items():
            found[y, x] = table.get((lane, frozenset((name,))), 1.0)
        found[y, "all"] = table.get((lane, frozenset(others.values())), 1.0)
    return found


def is_feasible(found: Mapping[tuple[str, str], float]) -> bool:
    """Returns whether communication and computation should overlap, by the papers' rule."""
    return min(found["comm", "comp"], found["comp", "comm"]) > FEASIBLE


def lines_of_alphas(found: Mapping[tuple[str, str], float]) -> list[str]:
    """Returns lines for people: one for each stream, then the rule."""
    text = []
    for y in STREAMS:
        words = ", ".join(f"{value:.2f} during {x}" for (one, x), value in found.items() if one == y)
        text.append(f"{y} keeps {words}")
    verdict = "overlap pays" if is_feasible(found) else "sequential is faster"
    return [*text, f"both comm and comp above {FEASIBLE:g}: {verdict}"]


def lines_by_copy(machine: Mapping[str, Any]) -> list[str]:
    """Returns a line for each size and direction of copies."""
    text = []
    for size in sizes(machine):
        for lane, where in COPIES.items():
            found = alphas(machine, lane, size)
            kept = ", ".join(f"{y} keeps {found[y, 'mem']:.2f}" for y in ("comm", "comp"))
            text.append(f"while copies of {size:.3g} bytes go {where}: {kept}")
    return text


# ---- --keep: decisions by steps of one layer on random rows; a training run would decide by the same races ----

SETTLED = 2  # steps in a row


def options_of(model: Model) -> Options:
    """Returns the options of the run: those of a DeepSpeed config, overridden by flags."""
    base = Options() if model.section is None else model.section
    return replace(base, **{name: value for name in HELD if (value := getattr(model, name)) is not None})


def _check_keep(model: Model, ranks: int) -> None:
    """Raises BadInput if there is nothing to decide, or if the kind of the layer is not known."""
    if ranks == 1 and model.memory_budget is None and model.host_memory_budget is None:
        raise BadInput("--keep: one rank without a budget has nothing to choose; start all ranks by torchrun")
    if model.activation is None:
        raise BadInput(
            "--keep: --activation is missing: answers are kept by kind of layer, and neither flag nor config says it"
        )


def _settle(context: Any, model: Model, most_steps: int, progress: Callable[[str], None]) -> int:
    """Trains until the context's tuner has decided. Returns the number of steps. Collective."""
    import torch

    from ..adapters.torch.layer import MoeLayer
    from ..adapters.torch.layer_config import MoeConfig
    from ..adapters.torch.options import layer_options

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[model.dtype]
    config = MoeConfig(
        model_width=model.model_width,
        hidden_width=model.hidden_width,
        num_experts=model.num_experts,
        top_k=model.top_k,
        dtype=dtype,
        activation=model.activation,
        gated=bool(model.gated),
        bias=bool(model.bias),
        **layer_options(options_of(model), fused=True),
    )
    layer = MoeLayer(context, config)
    M, H, T, K = model.model_width, model.hidden_width, model.tokens, model.top_k
    shapes = {"w1": (H, M), "w3": (H, M), "w2": (M, H), "b1": (H,), "b3": (H,), "b2": (M,)}
    generator = torch.Generator().manual_seed(7)

    def made_up(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    experts = [
        {name: made_up(*shapes[name]).requires_grad_() for name in layer.members}
        for _ in range(layer.num_local_experts)
    ]
    tokens = made_up(T, M).requires_grad_()
    ids = (torch.arange(T * K) % model.num_experts).view(T, K)
    weights = torch.full((T, K), 1.0 / K)
    steps = settled = 0
    while steps < most_steps and settled < SETTLED:
        for expert in experts:
            for parameter in expert.values():
                parameter.grad = None
        layer(tokens, ids, weights, experts).sum().backward()
        steps += 1
        settled = settled + 1 if context.stats()["last_is_settled"] and context.decisions() else 0
        progress(f"deciding: step {steps}")
    return steps


def _keep(context: Any, place: str | bool, cache: str | None) -> dict[str, Any]:
    """Writes the context's answers to the file and returns what --json prints about it. One rank calls this."""
    from ..adapters.torch import tuner
    from ..config import TunerOptions

    tuner.keep(context, TunerOptions(decisions=place, cache=cache))
    return {"path": decision_cache.place(place, cache), "answers": context.answers(), "decisions": context.decisions()}
