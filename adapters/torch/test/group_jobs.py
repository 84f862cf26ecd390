# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: groups of several sizes, joins that fail, closed contexts, forked workers, exits, and ranks that are
silent, are killed, or are interrupted while they wait."""

import gc
import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import meeting
import pytest
import torch
import torch.distributed as dist
from layer_cases import Case, M, close, compare, group, raises, world
from sluice import errors
from sluice.adapters.torch import Context, EpGroup
from sluice.adapters.torch.rendezvous import join
from sluice.errors import InvalidArgument, InvalidState, Mismatch, NotFound, PeerRefused, SluiceError, TimedOut


def unequal_groups():
    """Ranks that are in different numbers of the host's groups can still join."""
    W, rank = world()
    for _ in range(2):
        dist.new_group([1, 2], use_local_synchronization=True) if rank > 0 else None
    case = Case(W, tokens=(8,), seed=89)
    case.check(case.layer(Context(group())), rank)


def join_fails():
    """A rank that cannot take part, or does not join, is named on the others; later they can join."""
    W, rank = world()
    from sluice.adapters.torch import rendezvous

    ranks = tuple(range(W))

    def prepare():
        if rank == 1:
            raise NotFound("no compiler here")

    with raises(NotFound if rank == 1 else PeerRefused, "no compiler here", None if rank == 1 else 1):
        rendezvous.join(ranks, prepare, timedelta(seconds=60))
    dist.barrier()
    if rank == W - 1:
        rendezvous._joined[ranks] += 1
    else:
        with raises(TimedOut, peer=W - 1):
            EpGroup.for_ranks(ranks, timedelta(seconds=4))  # the others need almost none of it
    dist.barrier()
    joined, _ = rendezvous.join(ranks, lambda: None, timedelta(seconds=60))
    joined.leave()


def several_groups():
    """Four ranks run layers over pairs, over all ranks, and over one rank, in one process each."""
    W, rank = world()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [EpGroup.for_ranks(pair), EpGroup.for_ranks(range(4)), EpGroup.for_ranks([rank])]
    assert EpGroup.for_ranks(pair) is groups[0] and groups[0].world_size == 2 and groups[2].comm is None
    assert [g.rank for g in groups] == [rank % 2, rank, 0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert EpGroup.for_ranks(pair, groups[0].timeout) is groups[0] and not told
        assert EpGroup.for_ranks(pair, timedelta(seconds=7)) is groups[0]
    assert len(told) == 1 and "7 s has no effect" in str(told[0].message), told
    contexts = [Context(g) for g in groups]
    for turn in range(3):
        for g, context in zip(groups, contexts):
            case = Case(g.world_size, tokens=(10, 5), seed=90 + turn)
            case.check(case.layer(context), g.rank)
    # Experts in an order of the host's own.
    case = Case(4, per_rank=1, tokens=(10, 5), seed=95)
    table = [3, 1, 0, 2]
    tokens, ids, weights, _ = case.inputs(rank)
    mine = table.index(rank)
    params = [{k: v.clone().requires_grad_() for k, v in case.params[mine].items()}]
    out = case.layer(contexts[1], expert_rank=table)(tokens, ids, weights, params)
    close("output", out.detach(), case.expected(rank)[0], 2e-5)
    for wrong in ([1, 0], [0, 0, 1], [], [rank - 1, rank + 4]):
        with raises(InvalidArgument):
            EpGroup.for_ranks(wrong)
    dist.barrier()


def placements():
    """An error names what is wrong with a placement, and the layer continues as before; then experts move, so that
    ranks have different numbers of them."""
    W, rank = world()
    case = Case(W, tokens=(7,), seed=98)
    layer = case.layer(Context(group()))
    before = layer.placement()
    owners, slots = list(before.expert_rank), list(before.expert_slot)
    turned = slots if rank == 0 else [1 - s for s in slots]
    tokens, ids, weights, params = case.inputs(rank)
    out = None
    for wrong, error_type, text in (
        ((owners, turned), Mismatch, "expert_slot[0]"),
        ((owners, slots[1:]), InvalidArgument, "expert_slot names 3 experts, the layer has 4"),
        ((owners, [0] * len(slots)), InvalidArgument, "slot 0 of rank 0"),
        ((owners, slots, 0), InvalidArgument, "epoch is 0"),
        ((owners, slots), InvalidState, "steps of this layer are outstanding"),
    ):
        if error_type is InvalidState:
            out = layer(tokens, ids, weights, params)
        with raises(error_type, text):
            layer.replace_experts(*wrong)
        assert layer.placement() == before
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    del out
    owners, slots = [1, 1, 0, 1], [2, 0, 0, 1]
    layer.replace_experts(owners, slots)
    assert layer.placement() == (tuple(owners), tuple(slots), before.epoch + 1)
    mine = sorted((slot, e) for e, (owner, slot) in enumerate(zip(owners, slots)) if owner == rank)
    assert layer.num_local_experts == len(mine) == (1, 3)[rank]
    tokens, ids, weights, _ = case.inputs(rank)
    out = layer(
        tokens, ids, weights, [{k: v.clone().requires_grad_() for k, v in case.params[e].items()} for _, e in mine]
    )
    out.backward(case.cotangents[rank])
    for name, got, want in zip(("output", "tokens.grad"), (out.detach(), tokens.grad), case.expected(rank)):
        close(name, got, want, case.tolerance())


def lifetimes():
    """Closed objects raise errors; layers keep what they need; a group is shared and created again."""
    W, rank = world()
    first = group()
    assert group() is first
    context = Context(first)
    case = Case(W, tokens=(8,), seed=80)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    del context
    gc.collect()
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    out = layer(tokens, ids, weights, params)
    dist.barrier()
    first.close()
    first.close()
    for action in (lambda: layer(tokens, ids, weights, params), lambda: out.backward(case.cotangents[rank])):
        with raises(SluiceError, "closed"):
            action()
    second = group()
    assert second is not first and second.alive
    case.check(case.layer(Context(second)), rank)


class Rows(torch.utils.data.Dataset):
    def __init__(self, layer):
        self.layer = layer  # the worker inherits it by fork

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((M,), float(index))


def forked_workers():
    """DataLoader workers start by fork, run, and exit while layers are in use; a child's handles are inert."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=81)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    loader = torch.utils.data.DataLoader(Rows(layer), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = []
    for batch in loader:
        batches.append(batch.shape)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    out.backward(case.cotangents[rank])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            layer(tokens.detach(), ids, weights.detach(), params)
        except SluiceError as error:
            code = 0 if "fork" in str(error) else 2
        del layer, context
        gc.collect()
        EpGroup.for_ranks().close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    case.check(layer, rank)
    assert len(batches) == 4


def outstanding_at_exit():
    """Returns with steps and groups alive: the process must end by itself."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=82)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    global kept_for_exit
    kept_for_exit = [layer(tokens, ids, weights, params) for _ in range(3)]
    kept_for_exit.append(kept_for_exit)  # a cycle, for the last collection
    dist.barrier()


def exit_during_pass():
    """Returns while a daemon thread waits inside the library for a rank that arrives only after this one has ended."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=87)
    layer = case.layer(context := Context(group()))
    tokens, ids, weights, params = case.inputs(rank)
    if rank == 0:
        threading.Thread(target=lambda: layer(tokens, ids, weights, params), daemon=True).start()
        while context.calls == 0:
            time.sleep(0.01)
        time.sleep(0.5)  # the thread enters the wait
    else:
        meeting.until_gone()


def torn_down():
    """The host destroys all process groups first; Sluice's then raise errors, can be closed and created again."""
    W, rank = world()
    first = group()
    case = Case(W, tokens=(8,), seed=88)
    layer = case.layer(Context(first))
    tokens, ids, weights, params = case.inputs(rank)
    out = layer(tokens, ids, weights, params)
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), W, is_master=False)  # outlives the group
    store.add("torn_down", 1)
    host = dist.distributed_c10d._get_default_store()  # rank 0's holds the server
    dist.destroy_process_group()
    assert not first.alive
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), world_size=W, rank=rank)
    second = group()
    assert second is not first and second.alive and first.closed
    with raises(SluiceError):
        out.backward(case.cotangents[rank])
    case.check(case.layer(Context(second)), rank)
    for _ in range(3):  # made again and again: no rank may find an old group's addresses
        EpGroup.for_ranks(list(range(W))).close()
    assert group().alive
    dist.barrier()  # rank 0 holds the store that the others may still be asking
    return host is not None


def impatient_group(seconds):
    """Returns a group whose passes have this deadline, and whose ranks have more time for the rendezvous."""
    from sluice.adapters.torch import group as module

    patient, module.join = module.join, lambda ranks, prepare, _: join(ranks, prepare, timedelta(seconds=60))
    try:
        return EpGroup.for_ranks(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))
    finally:
        module.join = patient


def evaluates_alone():
    """Rank 0 evaluates and gives up; then rank 1 calls a training forward. Both hear why."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=85)
    layer = case.layer(Context(impatient_group(seconds=2)))
    tokens, ids, weights, params = case.inputs(rank)
    if rank == 1:
        meeting.hear("given up", [0])
    with torch.set_grad_enabled(rank == 1), pytest.raises(errors.PeerLost if rank else TimedOut) as told:
        layer(tokens, ids, weights, params)
    text = str(told.value)
    assert told.value.peer == 1 - rank and errors.HOST_REMEDY in text and "destroy it" not in text, text
    if rank == 0:
        assert "in evaluation too" in text, text
        meeting.say("given up")
    else:
        assert "rank 1 entered this call after rank 0 had given up" in text, text
        assert "rank 0 runs a forward without a backward (needs_backward 0" in text, text
    meeting.part(range(W))


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


def interrupted(transport):
    """Sends Ctrl-C while rank 0 waits for a rank that does not arrive. Returns the seconds until rank 0 stops."""
    W, rank = world()
    case = Case(W, tokens=(8,), seed=85)
    layer = case.layer(Context(EpGroup.for_ranks(range(W), transport=transport)))
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
