# SPDX-License-Identifier: Apache-2.0
"""Compares experts that swap places during training, with AdamW's state, with experts that stay."""

import os
import signal
import threading
import time
from pathlib import Path

import meeting
import pytest
import ranks
import torch
import torch.distributed as dist
from layer_cases import raises
from sluice.adapters.torch import Arriving, EpGroup, Leaving, Migration
from sluice.errors import InvalidArgument, PeerRefused, SluiceError

STEPS = 9


def _expert(number):
    generator = torch.Generator().manual_seed(number)
    return torch.nn.Parameter(torch.randn(70, 50, generator=generator))


def _differentiate(parameter, number, step):
    generator = torch.Generator().manual_seed(1000 * step + number)
    parameter.grad = parameter.detach() * torch.randn(parameter.shape, generator=generator)


def _items(parameter, state, own, other, peer):
    """The slot's expert leaves, and another one arrives in the same tensors. Gradients are created again in each step,
    so they are sent from a buffer."""
    buffer = torch.empty_like(parameter)
    still = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return buffer, [Leaving(own, peer, still, [buffer]), Arriving(other, peer, still, [buffer])]


def trained(rate):
    """A rank's expert that moves away and back has the bits of one that stays."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    group = EpGroup.unshared(range(2))
    migration = Migration(group, bytes_per_second=rate)
    slot, own = _expert(rank), rank
    optimizer = torch.optim.AdamW([slot], lr=0.01)
    for step in range(STEPS):
        _differentiate(slot, own, step)
        if step > 0:  # begun after the previous update
            buffer.copy_(slot.grad)  # noqa: F821
            migration.commit()
            slot.grad.copy_(buffer)  # noqa: F821
            own = 1 - own
            assert migration.progress()["phase"] == "committed"
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 < STEPS:
            buffer, items = _items(slot, optimizer.state[slot], own, 1 - own, peer)
            migration.begin(step + 1, items)
    assert migration.progress()["staged_bytes"] == 0
    still = _expert(own)
    wanted = torch.optim.AdamW([still], lr=0.01)
    for step in range(STEPS):
        _differentiate(still, own, step)
        wanted.step()
    kept = [wanted.state[still][key] for key in ("exp_avg", "exp_avg_sq", "step")]
    found = [optimizer.state[slot][key] for key in ("exp_avg", "exp_avg_sq", "step")]
    assert torch.equal(slot, still) and all(map(torch.equal, found, kept))
    group.close()  # and the migration with it
    migration.close()


def refused():
    """A tensor with gaps is refused. If rank 1 refuses, nothing moves and all are told."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    migration = Migration(EpGroup.unshared(range(2)))
    values = torch.full((8,), float(rank))
    with raises(InvalidArgument, "not contiguous"):
        migration.begin(1, [Leaving(3 + rank, peer, [torch.zeros(4, 4).t()])])
    migration.begin(1, [Leaving(rank, peer, [values]), Arriving(peer, peer, [values])])
    with raises(InvalidArgument if rank == 1 else PeerRefused, "no room"):
        migration.commit("no room" if rank == 1 else None)
    assert migration.progress()["phase"] == "aborted" and values.tolist() == [float(rank)] * 8
    dist.barrier()  # the other rank may still be in begin
    migration.close()


def _watched_commit(migration, until):
    """Commits on a separate thread, up to this phase. Returns the thread, and the list for its exception."""
    raised = []

    def run():
        try:
            migration.commit()
        except SluiceError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while migration.progress()["phase"] != until and thread.is_alive():
        time.sleep(0.001)
    return thread, raised


def _stop(pid):
    """Stops a process. On a loaded machine its threads run on for a while after kill has returned."""
    os.kill(pid, signal.SIGSTOP)
    tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    while any(task.joinpath("stat").read_text().rpartition(") ")[2][0] != "T" for task in tasks):
        time.sleep(0.001)


def settled():
    """Rank 2 is stopped when it is ready, and killed when the others have agreed, so they do not know its outcome.

    Returns [end of commit, phase, tensor of an arriving expert, epoch by settle, phase, the same tensor].
    """
    rank, peer = dist.get_rank(), (dist.get_rank() + 1) % 3
    migration = Migration(EpGroup.unshared(range(3)))
    leaving, place = torch.full((5000,), float(rank)), torch.full((5000,), -1.0)
    migration.begin(1, [Leaving(rank, peer, [leaving]), Arriving((rank + 2) % 3, (rank + 2) % 3, [place])])
    if rank == 2:
        meeting.store().set("victim", str(os.getpid()))
        thread, _ = _watched_commit(migration, "ready")
        meeting.say("ready")
        thread.join()
    meeting.hear("ready", [2])
    victim = int(meeting.store().get("victim"))
    if rank == 0:
        _stop(victim)
        meeting.say("stopped")
    meeting.hear("stopped", [0])
    thread, raised = _watched_commit(migration, "agreed")
    meeting.say("agreed")
    if rank == 0:
        meeting.hear("agreed", [0, 1])
        os.kill(victim, signal.SIGKILL)
    thread.join()
    found = [type(raised[0]).__name__, migration.progress()["phase"], place.unique().tolist()]
    epoch = migration.settle(EpGroup.unshared(range(2)))
    found += [epoch, migration.progress()["phase"], place.unique().tolist()]
    migration.close()
    meeting.part([0, 1])
    return found


@pytest.mark.parametrize("rate", [None, 50_000_000])
def test_Migration_ExpertsThatMoveInEveryStep_KeepTheirBits(rate):
    ranks.run(2, trained, rate=rate)


def test_Migration_Refused_NothingMovesAndAllAreTold():
    ranks.run(2, refused)


def test_Migration_UndecidedRanksThatSettle_GoOnInOneEpoch():
    ended = ranks.finish(ranks.start(3, settled))
    assert ended[2].result is None and ended[2].code < 0
    for rank, end in enumerate(ended[:2]):
        assert end.result == ["PeerLost", "undecided", [-1.0], 1, "committed", [float((rank + 2) % 3)]], end.result
