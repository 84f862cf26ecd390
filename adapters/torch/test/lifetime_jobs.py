# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: closed contexts, forked workers, exits, and groups that the host destroys."""

import gc
import os
import threading
import time

import meeting
import torch
import torch.distributed as dist
from layer_cases import Case, M, compare, group, raises, world
from sluice.adapters.torch import Context, EpGroup
from sluice.errors import SluiceError


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
    return True


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
    return len(batches)


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
    return True


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
    return True


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
