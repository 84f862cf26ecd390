# SPDX-License-Identifier: Apache-2.0
"""Ranks that are silent, are killed, or are stopped while they wait."""

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
    """A group whose passes have this deadline, and whose ranks are given more time for meeting."""
    from sluice.adapters.torch import group as module

    patient, module.join = module.join, lambda ranks, prepare, _: join(ranks, prepare, timedelta(seconds=60))
    try:
        return EpGroup.for_ranks(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))
    finally:
        module.join = patient


def silent_peer():
    """The last rank never calls the layer: the others learn at the deadline which rank it is."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=83)
    layer = case.layer(Context(impatient_group(seconds=3)))
    tokens, ids, weights, params = case.inputs(rank)
    result = None
    if rank == W - 1:
        meeting.hear("told", range(W - 1))
    else:
        meeting.say("here")
        meeting.hear("here", range(W - 1))  # of the three seconds the living need next to nothing
        began = time.monotonic()
        try:
            layer(tokens, ids, weights, params)
        except SluiceError as error:
            result = type(error).__name__, error.peer, time.monotonic() - began, str(error)
        meeting.say("told")
    meeting.part(range(W))
    return result


def evaluates_alone():
    """Rank 0 evaluates, and gives up; then rank 1 comes with a forward of training."""
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


def killed_peer(posted_first, leaves_child=False):
    """The last rank is killed, after the others went into their backward or before; a child that it forked may live."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=84)
    layer = case.layer(Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    others = range(W - 1)
    if rank == W - 1:
        meeting.hear("going" if posted_first else "forward done", others)
        if posted_first:
            time.sleep(0.5)  # so that the others are usually waiting by then: the result is the same
        if leaves_child:
            _leave_child()
        meeting.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    meeting.say("forward done")
    if not posted_first:
        meeting.hear("dying", [W - 1])
    meeting.say("going")
    began = time.monotonic()
    result = None
    try:
        out.backward(case.cotangents[rank])
    except SluiceError as error:
        result = type(error).__name__, error.peer, time.monotonic() - began, str(error)
    if leaves_child and rank == 0:
        os.kill(int(meeting.store().get("test/child")), signal.SIGKILL)
    meeting.part(others)
    return result


def _leave_child():
    """Forks what a rank's forks are, a worker of a data loader: it has copies of all descriptors, and lives on."""
    child = os.fork()
    if child == 0:
        time.sleep(90)  # unless it is notified before that
        os._exit(0)
    meeting.store().set("test/child", str(child))


def interrupted():
    """Ctrl-C while rank 0 waits for a rank that does not come. Seconds until its loop sees it."""
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
