# SPDX-License-Identifier: Apache-2.0
"""Jobs of the ranks of test_cached_decisions.py: runs that begin with decisions in files."""

from pathlib import Path
from types import SimpleNamespace

import sluice
import torch
import torch.distributed as dist
from layer_cases import Case, group, world
from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import InvalidArgument, InvalidState, SluiceError


def kept_file(folder, first, others):
    """Runs a context with `first` in the first rank's file and `others` in the files of the others. Returns its report,
    and the contents of the first rank's file afterwards."""
    W, rank = world()
    path = Path(folder) / f"kept{rank}.json"
    text = first if rank == 0 else others
    if text is not None:
        path.write_text(text)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(decisions=str(path))))
    case = Case(W, tokens=(60, 60, 60), seed=51)
    layer = case.layer(context, chunks=0)
    for _ in range(100):  # until there is a decision, which all ranks make at the same step
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
        if context.decisions():
            break
    why = [entry["why"] for entry in context.decisions()]
    exported = Path(folder) / f"exported{rank}.json"
    count = sluice.export_decisions(exported)
    context.close()
    dist.barrier()
    return why, count, exported.read_text()


def strange_file(folder, text):
    """Returns the error on each rank, twice, if the first rank's file is not of Sluice: kind and message."""
    W, rank = world()
    path = Path(folder) / f"kept{rank}.json"
    if rank == 0:
        path.write_text(text)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(decisions=str(path))))
    told = []
    for _ in range(2):  # as in a notebook, in which a cell is run again after its error
        try:
            Case(W, tokens=(8, 8), seed=51).layer(context, chunks=0)
        except SluiceError as error:
            told.append((type(error).__name__, str(error)))
    context.close()
    dist.barrier()
    return told


def pinned_file(folder, text):
    """An invalid pinned file is an error on the rank that has the file."""
    path = Path(folder) / "pinned.json"
    if text is not None:
        path.write_text(text)
    context = Context(None, ContextOptions(tuner=TunerOptions(pinned=str(path))))
    try:
        Case(1, tokens=(8,)).layer(context)
    except InvalidArgument as error:
        return str(error)
    finally:
        context.close()
    return None


def exported_machine(folder):
    """Returns the errors of exporting a machine without any layer and before any step, and the machine that a run
    exports and with which a second run starts."""
    W, rank = world()
    model, path = torch.nn.Module(), Path(folder) / f"machine{rank}.json"
    refusals = []

    def refused():
        try:
            sluice.export_machine(model, path)
        except (InvalidArgument, InvalidState) as error:
            refusals.append(str(error))

    refused()
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(calibrate=0.1, cache=folder)))
    case = Case(W, tokens=(60, 60, 60), seed=51)
    layer = case.layer(context, chunks=0)
    model._sluice = SimpleNamespace(contexts=lambda: [context])  # as a host's layer has it
    refused()
    for _ in range(60):
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    made = sluice.export_machine(model, path)
    context.close()
    again = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(mode="model", machine=str(path))))
    layer = case.layer(again, chunks=0)
    for _ in range(3):
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    why = {entry["why"] for entry in again.decisions()}
    again.close()
    dist.barrier()
    return refusals, made, path.read_text(), why
