# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that are silent, are killed, or are interrupted while they wait."""

import os
import signal
import threading
import time
from datetime import timedelta

import meeting
import torch
import torch.distributed as dist
from layer_cases import Case, group, world
from sluice.adapters.torch import Context, EpGroup
from sluice.adapters.torch.rendezvous import join
from sluice.errors import SluiceError


def impatient_group(seconds):
    """Returns a group whose passes have this deadline, and whose ranks have more time for the rendezvous."""
    from sluice.adapters.torch import group as module

    patient, module.join = module.join, lambda ranks, prepare, _: join(ranks, prepare, timedelta(seconds=60))
    try:
        return EpGroup.for_ranks(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))
    finally:
        module.join = patient


def evaluates_alone():
    """Rank 0 evaluates and gives up; then rank 1 calls a training forward."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=85)
    layer = case.layer(Context(impatient_group(seconds=2)))
    tokens, ids, weights, params = case.inputs(rank)
    if rank == 1:
        meeting.hear("given up", [0])
    try:
        with torch.set_grad_enabled(rank == 1):
            layer(tokens, ids, weights, params)
        result = None
    except SluiceError as error:
        result = type(error).__name__, error.peer, str(error)
    if rank == 0:
        meeting.say("given up")
    meeting.part(range(W))
    return result


def killed_peer():
    """The last rank is killed after the others have entered their backward. A child of it, like a worker of a data
    loader, has copies of all its descriptors and continues to run."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=84)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    others = range(W - 1)
    if rank == W - 1:
        meeting.hear("going", others)
        time.sleep(0.5)  # the others are usually waiting by then; the result is the same if not
        child = os.fork()
        if child == 0:
            time.sleep(90)  # unless it is killed before that
            os._exit(0)
        meeting.store().set("test/child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    meeting.say("going")
    began = time.monotonic()
    result = None
    try:
        out.backward(case.cotangents[rank])
    except SluiceError as error:
        result = type(error).__name__, error.peer, time.monotonic() - began, str(error)
    if rank == 0:
        os.kill(int(meeting.store().get("test/child")), signal.SIGKILL)
    meeting.part(others)
    return result


def interrupted():
    """Sends Ctrl-C while rank 0 waits for a rank that does not arrive. Returns the seconds until rank 0 stops."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=85)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    took, pressed = None, []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        threading.Timer(0.5, press).start()
        try:
            layer(tokens, ids, weights, params)
        except KeyboardInterrupt:
            took = time.monotonic() - pressed[0]
        meeting.say("interrupted")
    meeting.hear("interrupted", [0])  # a peer that ends would end the wait too
    meeting.part(range(W))
    return took
