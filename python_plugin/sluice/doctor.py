# SPDX-License-Identifier: Apache-2.0
"""`python -m sluice doctor [--json] [--config FILE]`: what is installed, what would be used, what is wrong, what to do.

Checks are independent: a missing piece becomes a line with advice, never a traceback. The exit status is 0 if a
training run with `"sluice": {"enabled": true}`, or with the given config, would run on Sluice, and 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from . import cache_folder
from .doctor_config import BAD, NOTE, OK, Finding, installed_version
from .errors import SluiceError

TOLERANCE = 1e-5
LAST = 5  # the number of decisions shown


EXAMPLE = """examples:
  sluice doctor
  sluice doctor --config ds_config.json
  sluice doctor --config mixtral/config.json
  sluice doctor --config train_mixtral.sh
  sluice doctor --tiers /mnt/nvme
  sluice doctor --json | jq '.findings[] | select(.state == "bad")'

exit status: 0 ready; 1 something is wrong, see the lines marked `bad`; 2 wrong arguments
"""


def main(arguments: list[str]) -> int:
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sluice doctor",
        description=__doc__.splitlines()[0].rpartition(": ")[2],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a ds_config.json, config.json of a transformers model, or script with Megatron's flags: what would be "
        "swapped",
    )
    parser.add_argument(
        "--tiers",
        metavar="FOLDER",
        help="measures what an offloaded optimizer works with: host memory, and a file of 128 MiB in this folder",
    )
    options = parser.parse_args(arguments)
    findings = examine(options.config) + ([] if options.tiers is None else list(_tiers(options.tiers)))
    healthy = all(finding.state != BAD for finding in findings)
    if options.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:>4}  {finding.check:<18} {finding.detail}")
            if finding.advice:
                print(f"{'':>4}  {'':<18} -> {finding.advice}")
        print("sluice: ready" if healthy else "sluice: not ready: see the lines marked `bad`")
    return 0 if healthy else 1


def examine(config_file: str | None = None) -> list[Finding]:
    """Runs all checks, in the order in which a run needs them, and the check of a config last."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("library", _library),
        ("self-check in C", _self_check),
        ("calibration", _calibration),
        ("kept decisions", _kept),
        ("last decisions", _decisions),
        ("torch", _torch),
        ("torch adapter", _torch_adapter),
        ("loader", _loader),
        ("switch", _switch),
        ("options", _options),
        ("deepspeed", _deepspeed),
        ("transformers", _transformers),
        ("megatron", _megatron),
    ]
    if config_file is not None:
        checks.append(("config", functools.partial(_config, config_file)))
    findings: list[Finding] = []
    for name, check in checks:
        try:
            # Hosts print while they are imported; their output must not end up in the JSON.
            with contextlib.redirect_stdout(io.StringIO()):
                findings.extend(list(check()))
        except cache_folder.NoCacheFolder as error:
            findings.append(Finding(name, NOTE, "nothing is kept on this machine", error.message))
        except Exception as error:
            text = str(error).strip().splitlines()[0] if str(error).strip() else ""
            findings.append(
                Finding(name, BAD, f"{type(error).__name__}: {text}", "see the message; then run this again")
            )
    return findings


def _config(path: str) -> Iterator[Finding]:
    from sluice import doctor_config

    return doctor_config.examine(path)


def _tiers(folder: str) -> Iterator[Finding]:
    from . import tiers

    try:
        rates = tiers.measure(folder)
    except (OSError, SluiceError) as error:
        yield Finding("tiers", BAD, f"{folder}: {error}", "name a folder that may be written, with 128 MiB of room")
        return
    yield Finding("tier: memory", OK, f"updates move {rates.update:.3g} bytes/s", f"--update-rate {rates.update:.2e}")
    moved = f"{folder}: {rates.write:.3g} bytes/s written, {rates.read:.3g} read"
    option = f"--copy-rate {min(rates.write, rates.read):.2e} for `sluice plan --optimizer`"
    yield Finding("tier: file", OK, moved, option)


def _python() -> Iterator[Finding]:
    import sluice

    yield Finding("python", OK, f"{sys.version.split()[0]} at {sys.executable}")
    yield Finding("sluice", OK, f"{sluice.__version__} at {os.path.dirname(os.path.abspath(sluice.__file__))}")


def _library() -> Iterator[Finding]:
    from sluice import _library

    library = _library.load()
    info = library.ffi.string(library.lib.sluice_build_info()).decode()
    yield Finding("library", OK, f"{library.path}: {info}")
    yield Finding("device", OK, "cpu; nothing of Sluice has run on a GPU yet")


def _self_check() -> Iterator[Finding]:
    from sluice import _library, self_check

    result = self_check.run(_library.load())
    errors = f"error of forward {result['forward_error']:.1e}, gradients by {result['gradient_error']:.1e}"
    good = result["forward_error"] <= TOLERANCE and result["gradient_error"] <= TOLERANCE
    advice = "" if good else "the library computes wrong results on this machine: report it with this output"
    yield Finding("self-check in C", OK if good else BAD, f"one rank, forward and backward: {errors}", advice)
    taken = "in training the fastest for each shape is taken, torch's own GEMMs included"
    yield Finding("gemm", OK, f"{result['gemm']}; {taken}")


def _calibration() -> Iterator[Finding]:
    """Lists the calibrated machines in the cache folder that the C library uses."""
    from sluice.planning import machines

    folder = cache_folder.place()
    every = list(machines.entries(folder))
    finding = functools.partial(Finding, "calibration")
    for entry in every:
        if entry.refusal:
            yield finding(NOTE, f"{os.path.basename(entry.path)} in {folder} is not read", entry.refusal)
    found = [entry for entry in every if not entry.refusal]
    names = {entry.problem: os.path.basename(entry.path) for entry in reversed(found) if entry.problem}
    if "damaged" in names:
        yield finding(NOTE, f"{names['damaged']} in {folder} is damaged", "it is measured again when needed")
    elif names:
        (name,) = names.values()
        count = sum(bool(entry.problem) for entry in found)
        those = f"{count} of {len(found)} machines in {folder} are of another version's form ({name})"
        yield finding(NOTE, those, "they are measured again when needed")
    elif found:
        newest = max(found, key=lambda entry: entry.written)
        yield finding(OK, f"{len(found)} measured machines in {folder}; the newest: {newest.words()}")
    else:
        yield finding(OK, f"none in {folder}; `python -m sluice tune` makes one")


def _kept() -> Iterator[Finding]:
    """Checks the file of decisions that runs with "tuner": {"decisions": true} start from."""
    from sluice import decision_cache

    path = decision_cache.place(True, None)
    machines = _content("kept decisions", path, decision_cache.machines, "keeps any")
    if isinstance(machines, Finding):
        yield machines
        return
    if not machines:
        how = '"tuner": {"decisions": true}, or `python -m sluice tune --keep`, leaves them there'
        yield Finding("kept decisions", OK, f"none in {path}: {how}")
        return
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(os.path.getmtime(path)))
    count = sum(map(len, machines.values()))
    yield Finding("kept decisions", OK, f"{count} for {len(machines)} machines in {path}, written {written}")
    for words, answers in machines.items():
        if answers:
            yield Finding("kept decisions", OK, f"last of {len(answers)}: {decision_cache.line(answers[-1])} ({words})")


def _content(check: str, path: str, read: Callable[[str], Any], keeps: str) -> Any:
    """Returns the content of a file of decisions, or a Finding why it cannot be used. keeps: what a run then does."""
    from sluice import decision_log

    try:
        return read(path)
    except decision_log.Damaged as problem:
        return Finding(check, NOTE, f"{path} is damaged: {problem}", f"the next run that {keeps} replaces it")
    except OSError as error:
        return Finding(check, NOTE, f"{path} cannot be read: {error.strerror}", "look at its permissions")


def _decisions() -> Iterator[Finding]:
    """Shows the last decisions of tuners."""
    from sluice import decision_log

    path = os.path.join(cache_folder.place(), decision_log.NAME)
    entries = _content("last decisions", path, decision_log.read, "logs a decision")
    if isinstance(entries, Finding):
        yield entries
        return
    if not entries:
        yield Finding("last decisions", OK, f"none in {path}: a training run leaves them there when it ends")
    for entry in entries[-LAST:]:
        yield Finding("last decisions", OK, decision_log.line(entry))


def _torch() -> Iterator[Finding]:
    if installed_version("torch") is None:
        yield Finding("torch", BAD, "not installed", "install torch 2.4 or newer: the DeepSpeed adapter needs it")
        return
    import torch

    yield Finding("torch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        how = "connections made through a gloo group of Sluice's own per list of ranks; none for ep_size 1"
        yield Finding("communicator", OK, f"tcp: {how}")
    else:
        remedy = "install a torch with gloo (torch.distributed) for ep_size > 1"
        yield Finding("communicator", BAD, "this torch has no gloo", remedy)


def _torch_adapter() -> Iterator[Finding]:
    if installed_version("torch") is None:
        return
    from sluice.adapters.torch import build

    finding, make = functools.partial(Finding, "torch adapter"), "`python -m sluice.adapters.torch.build`"
    path, reasons = build.find()
    if path is not None:
        made = "shipped" if path == build.shipped_path() else "compiled"
        yield finding(OK, f"{made} for this torch: {path}")
        return
    for reason in reasons:
        yield finding(NOTE, reason, "it is compiled again if nothing else prevents that")
    compiler = build.compiler()
    if compiler is None:
        lacks = f"not compiled for this torch, and there is no C++ compiler ({os.environ.get('CXX', 'g++')})"
        yield finding(BAD, lacks, f"install g++ (or set CXX), then run {make}")
        return
    try:
        build.check_cache()
    except SluiceError as error:
        yield finding(BAD, "not compiled for this torch, and there is no place for it", error.message)
        return
    later = f"not compiled yet; the first run will do it with {compiler} (a minute)"
    yield finding(NOTE, later, f"run {make} now, so that the first run does not wait for it")


def _loader() -> Iterator[Finding]:
    points = importlib.metadata.entry_points()
    group = points.select(group="torch.backends") if hasattr(points, "select") else points.get("torch.backends", ())
    registered = any(point.value == "sluice_autoload:load" for point in group)
    version = installed_version("torch") or "0.0"
    old = tuple(int(part) for part in version.split(".")[:2]) < (2, 5)
    instead = "start scripts with `python -m sluice.run train.py` or `deepspeed --module sluice.run train.py`"
    finding = functools.partial(Finding, "loader")
    if not registered:
        yield finding(BAD, "the torch.backends entry point is not registered", f"reinstall the wheel, or {instead}")
    elif installed_version("torch") is None:
        yield finding(OK, "entry point torch.backends: torch loads it once it is installed")
    elif old:
        yield finding(NOTE, f"torch {version} has no autoload (2.5 has)", instead)
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") in ("0", ""):
        yield finding(NOTE, "TORCH_DEVICE_BACKEND_AUTOLOAD switches autoload off", f"unset it, or {instead}")
    else:
        yield finding(OK, "entry point torch.backends: loaded wherever torch is imported")


def _switch() -> Iterator[Finding]:
    from sluice import config

    word = os.environ.get(config.ENVIRONMENT)
    if word == "0":
        off = "SLUICE=0: Sluice is off whatever ds_config says"
        yield Finding("switch", NOTE, off, "unset SLUICE to let ds_config decide")
    elif config.resolve(None) is None:
        yield Finding("switch", OK, 'SLUICE is not set: "sluice": {"enabled": true} in ds_config switches on')
    else:
        yield Finding("switch", OK, f"SLUICE={word}: on whatever ds_config says")


def _options() -> Iterator[Finding]:
    """Checks SLUICE_OPTIONS, which layers of transformers and Megatron read: a mistake there is an error in a run."""
    from sluice import settings
    from sluice.options import ENVIRONMENT

    if os.environ.get(ENVIRONMENT, "").strip():
        options = settings.effective()
        said = "off" if options is None else options.full_message()
        yield Finding("options", OK, f"{ENVIRONMENT}, for transformers and Megatron-Core: {said}")


def _deepspeed() -> Iterator[Finding]:
    version = installed_version("deepspeed")
    if version is None:
        yield Finding("deepspeed", NOTE, "not installed: nothing to swap", "pip install deepspeed, to train with it")
        return
    if importlib.util.find_spec("torch") is None:
        return
    from deepspeed.moe.sharded_moe import TopKGate
    from deepspeed.runtime.engine import DeepSpeedEngine

    from sluice import autoload
    from sluice.adapters.deepspeed import hook
    from sluice.adapters.deepspeed.moe import probe

    layout = probe.gate_format(TopKGate)
    if layout is None:
        takes = f"{version}: its gate takes {inspect.signature(TopKGate.forward)}"
        yield Finding("deepspeed", BAD, takes, "use a release from 0.15.4 to 0.19.8, or a newer Sluice")
    else:
        form = {"sparse": "sparse routes", "dense": "dense masks (an older release)"}[layout]
        yield Finding("deepspeed", OK, f"{version}: deepspeed.moe.layer.MoE would be swapped, routes come as {form}")
    yield from _auto_ep(version)
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        yield shared_memory_op(get_accelerator().create_op_builder("ShareMemCommBuilder").name)
    for problem in autoload.problems:
        yield Finding("hook", BAD, problem, "report it with this output")
    method: Any = getattr(DeepSpeedEngine, hook.METHOD, None)
    if method is None:
        yield Finding("hook", BAD, f"DeepSpeedEngine has no {hook.METHOD}", "use a release from 0.15.4 to 0.19.8")
    elif hasattr(method, "_sluice_original"):
        yield Finding("hook", OK, f"DeepSpeedEngine.{hook.METHOD} is wrapped")
    else:
        yield Finding("hook", NOTE, "not loaded in this process", "start scripts with `python -m sluice.run train.py`")


def shared_memory_op(name: str) -> Finding:
    """Checks the op that DeepSpeed silently compiles in the first `init_distributed` on a CPU, under a torch lock."""
    folder = os.path.join(_extensions(), name)
    lock = os.path.join(folder, "lock")
    is_built = os.path.isdir(folder) and any(entry.endswith(".so") for entry in os.listdir(folder))
    finding = functools.partial(Finding, "deepspeed's op")
    if os.path.exists(lock):
        left = f"{lock} is there{'' if is_built else ' without a library'}: a build is under way, or was interrupted"
        remedy = "if no compiler runs, delete that file: deepspeed.init_distributed waits for it forever"
        return finding(BAD, left, remedy)
    if is_built:
        return finding(OK, f"{name} is built in {folder}")
    later = f"{name} is not built: the first deepspeed.init_distributed compiles it for minutes, without output"
    now = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
    remedy = f'wait for it: an interrupted build leaves a lock. Or build it now: python -c "{now}"'
    return finding(NOTE, later, remedy)


def _extensions() -> str:
    """Returns the folder in which torch builds extensions. torch's own function would also create it."""
    import torch
    from torch.utils import cpp_extension

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named is not None:
        return named
    kind = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    abi = getattr(sys, "abiflags", "")
    folder = f"py{sys.version_info.major}{sys.version_info.minor}{abi}_{kind}"
    return os.path.join(cpp_extension.get_default_build_root(), folder)


def _auto_ep(version: str) -> Iterator[Finding]:
    """Checks AutoEP, DeepSpeed's own replacement of MoE blocks (since 0.19.2). Older releases yield no finding."""
    if importlib.util.find_spec("deepspeed.module_inject.auto_ep_layer") is None:
        return
    try:
        from sluice.adapters.deepspeed.moe.autoep import missing_steps
    except Exception as error:  # an import of DeepSpeed may fail
        text = f"{version} does not import here ({type(error).__name__}: {error})"
        yield Finding("AutoEP", NOTE, text, "its layers stay with DeepSpeed")
        return
    if missing_steps():
        text = f"{version}: its layer has no {', '.join(missing_steps())}, so it stays with DeepSpeed"
        yield Finding("AutoEP", NOTE, text, "use 0.19.8")
    else:
        yield Finding("AutoEP", OK, f'{version}: layers that "expert_parallel" makes would be swapped')


def _transformers() -> Iterator[Finding]:
    version = installed_version("transformers")
    if version is None:
        yield Finding("transformers", NOTE, "not installed", "pip install transformers, to use it with Sluice")
        return
    from transformers.integrations import moe

    import sluice.autoload  # noqa: F401  (its hook sees the import below)

    if not hasattr(moe, "ExpertsInterface"):
        remedy = "use transformers 5.23, or train without Sluice's experts"
        yield Finding("transformers", BAD, f"{version} has no registry of experts", remedy)
    elif "sluice" in moe.ALL_EXPERTS_FUNCTIONS:
        yield Finding("transformers", OK, f'{version}: experts_implementation="sluice" is registered')
    else:
        yield Finding("transformers", NOTE, f"{version}: not registered in this process", "import sluice in the script")


def _megatron() -> Iterator[Finding]:
    version = installed_version("megatron-core")
    if version is None:
        yield Finding("megatron", NOTE, "not installed", "pip install megatron-core, to use it with Sluice")
        return
    if importlib.util.find_spec("torch") is None:
        return
    try:
        from sluice import megatron
        from sluice.adapters.megatron.layer import missing_steps
    except Exception as error:  # without Transformer Engine, triton or a GPU Megatron's own imports may fail
        text = f"{version} does not import here ({type(error).__name__}: {error})"
        yield Finding("megatron", NOTE, text, "run doctor again in the environment in which its models train")
        return
    if missing_steps():
        lacks = f"{version}: its MoELayer has no {', '.join(missing_steps())}"
        yield Finding("megatron", BAD, lacks, "use a release from 0.16.1 to 0.19.2")
        return
    named = f"--spec {megatron.__name__} moe_block_spec, or {megatron.__name__}.with_sluice"
    yield Finding("megatron", OK, f"{version}: {named}, replaces MoELayer with Sluice's layer")
