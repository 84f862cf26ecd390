# SPDX-License-Identifier: Apache-2.0
"""Tests the communicator over c10d by itself: order, failures, deadlines, signals.

The ranks run only the callbacks of c10d_comm.cpp, without libsluice.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import meeting
import pytest
import ranks
import torch
import torch.distributed as dist
from sluice._sluice_abi import ffi
from sluice.adapters.torch._native import interruptible, native

OK, PEER_LOST, TIMED_OUT, ABORTED, EXTERNAL = 0, -10, -11, -12, -13
NEVER = 100  # seconds: the deadline of waits that another event must end
SOON = 30  # seconds, on the busiest machine: below NEVER and the groups' own 60


class Comm:
    """The callback table over a gloo group of its own."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(list(range(self.world)), backend="gloo", use_local_synchronization=True)
        self.vtable, self.user = native().open_group(SimpleNamespace(ffi=ffi), self.group.group_name)
        self.failure = ffi.new("sluice_host_failure_t *")

    def start(self, send, recv):
        """Starts an exchange. send, recv: a byte tensor per rank. Returns (status, request)."""
        exchange = ffi.new("sluice_exchange_t *")
        arrays = []
        for name, tensors in (("send", send), ("recv", recv)):
            pointers = ffi.new("void *[]", [ffi.cast("void *", tensor.data_ptr()) for tensor in tensors])
            sizes = ffi.new("uint64_t[]", [tensor.numel() for tensor in tensors])
            setattr(exchange, name, pointers)
            setattr(exchange, f"{name}_bytes", sizes)
            arrays += [pointers, sizes]
        out = ffi.new("void **")
        status = self.vtable.exchange_start(self.user, exchange, out, self.failure)
        return status, out[0]

    def wait(self, request, seconds):
        return self.vtable.exchange_wait(self.user, request, int(seconds * 1e9), self.failure)

    def why(self):
        return self.failure.peer, ffi.string(self.failure.message).decode()

    def destroy(self):
        self.vtable.destroy(self.user)


def sizes(world, turn):
    """Returns bytes[from][to], uneven, with zeros. The diagonal must never be read."""
    return [[((7 * s + 3 * r + turn) % 5) * (1 + 1000 * ((s + turn) % 3)) for r in range(world)] for s in range(world)]


def pattern(sender, receiver, count, turn):
    """Returns bytes that depend on sender, receiver and position."""
    return ((torch.arange(count) * 31 + sender * 7 + receiver * 13 + turn) % 251).to(torch.uint8)


def blocks(comm, table, turn):
    """Returns the sent and received blocks of this rank, of table[from][to] bytes."""
    me = comm.rank
    send = [pattern(me, peer, table[me][peer], turn) for peer in range(comm.world)]
    recv = [torch.full((table[peer][me],), 255, dtype=torch.uint8) for peer in range(comm.world)]
    return send, recv


def post(comm, table, turn):
    send, recv = blocks(comm, table, turn)
    status, request = comm.start(send, recv)
    assert status == OK, comm.why()
    return send, recv, request, turn


def check(comm, posted):
    _, recv, request, turn = posted
    assert comm.wait(request, NEVER) == OK, comm.why()
    for peer in range(comm.world):
        if peer == comm.rank:
            assert bool((recv[peer] == 255).all())
        else:
            assert torch.equal(recv[peer], pattern(peer, comm.rank, recv[peer].numel(), turn)), (peer, turn)


def uneven():
    """Blocks of uneven sizes arrive intact, with two exchanges in flight, and from another thread."""
    comm = Comm()
    for turn in range(100):
        check(comm, post(comm, sizes(comm.world, turn), turn))
    for turn in range(0, 100, 2):  # two in flight, waited for in order and in reverse
        first = post(comm, sizes(comm.world, turn), turn)
        second = post(comm, sizes(comm.world, turn + 1), turn + 1)
        for posted in (first, second) if turn % 4 else (second, first):
            check(comm, posted)
    big = [[3_000_001 + 17 * s + r for r in range(comm.world)] for s in range(comm.world)]
    check(comm, post(comm, big, 5))
    # From another thread, while this one computes.
    failures = []

    def elsewhere():
        try:
            for turn in range(20):
                check(comm, post(comm, sizes(comm.world, turn), turn))
        except BaseException as error:
            failures.append(repr(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    while thread.is_alive():
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert failures == []
    # Notes in the store.
    key = f"note-{comm.rank}".encode()
    comm.vtable.publish(comm.user, ffi.new("char[]", key), ffi.new("char[]", b"hello"))
    out = ffi.new("char[32]")
    assert comm.vtable.lookup(comm.user, ffi.new("char[]", key), out, 32) == 5
    assert ffi.buffer(out, 5)[:] == b"hello"
    assert comm.vtable.lookup(comm.user, ffi.new("char[]", b"absent"), out, 32) == 0
    comm.destroy()
    dist.barrier()


@contextlib.contextmanager
def threads_refused():
    """A stack too large for any system makes pthread_create fail with EAGAIN, for root too."""
    libc = ctypes.CDLL(None)
    before, huge = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)  # pthread_attr_t: 56 bytes
    assert libc.pthread_getattr_default_np(before) == 0 and libc.pthread_getattr_default_np(huge) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 50)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0


def threadless():
    """Rank 0's first wait cannot have the thread that ends waits, and fails. The next one on another communicator can,
    and keeps its deadline while rank 1 sends nothing."""
    first, second = Comm(), Comm()
    table = [[64, 64], [64, 64]]
    if first.rank == 0:
        with threads_refused():
            _, _, request, _ = post(first, table, 0)
            assert first.wait(request, NEVER) == EXTERNAL
            assert first.why()[0] == -1 and "no thread can be started" in first.why()[1], first.why()
        posted = post(second, table, 0)
        assert second.wait(posted[2], 0.3) == TIMED_OUT and second.why()[0] == 1, second.why()
        meeting.say("expired")
        check(second, posted)
    else:
        meeting.hear("expired", [0])
        check(second, post(second, table, 0))
    first.destroy()
    second.destroy()


def late():
    """The last rank is late: waits expire and name the rank, and later waits of the same communicator succeed.

    The rank starts after every other rank has seen it named three times, once of them at its deadline. Until all
    messages of the others have arrived, a wait may name one of them.
    """
    comm = Comm()
    last = comm.world - 1
    table = [[64] * comm.world for _ in range(comm.world)]
    if comm.rank == last:
        meeting.hear("expired", range(last))
        check(comm, post(comm, table, 0))
    else:
        posted, named, soonest = post(comm, table, 0), 0, NEVER
        while named < 3 or soonest > 1.0:
            began = time.monotonic()
            status = comm.wait(posted[2], 0.3)
            took, (peer, text) = time.monotonic() - began, comm.why()
            assert status == TIMED_OUT and 0.25 < took and 0 <= peer < 3 and "has not arrived" in text, (status, text)
            named, soonest = named + (peer == last), min(soonest, took)
        meeting.say("expired")
        assert comm.wait(posted[2], NEVER) == OK, comm.why()
        assert torch.equal(posted[1][last], pattern(last, comm.rank, 64, 0))
    for turn in range(3):  # the group still works
        check(comm, post(comm, table, turn))
    comm.destroy()
    dist.barrier()


def dead(posted_first):
    """The last rank is killed after the others posted, or before. The others soon get an error that names the rank, and
    cannot start further exchanges.

    A message posted after the death may be refused at once or fail in the wait: both are correct.
    """
    comm = Comm()
    last = comm.world - 1
    table = [[1 << 20] * comm.world for _ in range(comm.world)]
    check(comm, post(comm, table, 0))
    if comm.rank == last:
        meeting.hear("posted" if posted_first else "ready", range(last))
        meeting.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    send, recv = blocks(comm, table, 1)
    if not posted_first:
        meeting.say("ready")
        meeting.hear("dying", [last])
        time.sleep(0.5)  # the rank's end is usually noticed by then; either order is correct
    status, request = comm.start(send, recv)
    assert status == OK or not posted_first, (status, comm.why())
    meeting.say("posted")
    began = time.monotonic()
    if status == OK:
        status = comm.wait(request, NEVER)
    took = time.monotonic() - began
    why = comm.why()
    again, _ = comm.start(send, recv)
    comm.destroy()
    meeting.part(range(last))
    return status, took, why, again


def silent():
    """Rank 0 gives up on a silent peer and aborts. Waiting ranks, and a rank that arrives afterwards, fail at once.

    The silent rank sends nothing before it has failed, since its message would complete another rank's wait: it only
    receives from rank 0, which has sent one message.
    """
    comm = Comm()
    table = [[128] * comm.world for _ in range(comm.world)]
    last = comm.world - 1
    if comm.rank == last:
        meeting.hear("learnt", [0])  # silent, but alive
        from_first = [
            [128 if (source, to) == (0, last) else 0 for to in range(comm.world)] for source in range(comm.world)
        ]
        status, times = OK, 0
        while status == OK:
            send, recv = blocks(comm, from_first, 0)
            status, request = comm.start(send, recv)
            if status == OK:
                status, times = comm.wait(request, NEVER), times + 1
        assert times <= 2
        result = status, 0.0, comm.why()
    else:
        posted = post(comm, table, 0)
        meeting.say("posted")
        meeting.hear("posted", range(last))
        if comm.rank == 0:
            status = comm.wait(posted[2], 0.7)
            assert status == TIMED_OUT, (status, comm.why())
            why = comm.why()
            began = time.monotonic()
            comm.vtable.abort(comm.user)
            comm.vtable.abort(comm.user)
            assert comm.wait(posted[2], NEVER) == ABORTED, comm.why()
            assert comm.start(posted[0], posted[1])[0] == ABORTED
        else:
            began = time.monotonic()
            status = comm.wait(posted[2], NEVER)
            why = comm.why()
        result = status, time.monotonic() - began, why
        meeting.say("learnt")
        meeting.hear("learnt", range(last))  # the close at an orderly end must not be what the other rank notices
    comm.destroy()
    meeting.part(range(comm.world))
    return result


def aborted_elsewhere():
    """Another thread aborts while this one waits, which ends the wait; each time on a separate communicator."""
    soonest = NEVER
    for turn in range(3):
        comm = Comm()
        if comm.rank == 0:
            posted = post(comm, [[1] * comm.world for _ in range(comm.world)], 0)
            begun = threading.Event()
            called = []

            def abort(comm=comm, begun=begun, called=called):
                begun.wait()
                time.sleep(0.3)  # the other thread is usually waiting by then
                called.append(time.monotonic())
                comm.vtable.abort(comm.user)

            thread = threading.Thread(target=abort)
            thread.start()
            begun.set()
            assert comm.wait(posted[2], NEVER) == ABORTED
            ended = time.monotonic()
            thread.join()
            soonest = min(soonest, ended - called[0])
            meeting.say(f"aborted {turn}")
        meeting.hear(f"aborted {turn}", [0])  # a peer that ends would end the wait too
        comm.destroy()
    assert dist.get_rank() != 0 or soonest < 1, soonest  # the best of three: the machine may be busy
    meeting.part(range(dist.get_world_size()))


def others_handler():
    """Ctrl-C during a wait under a handler of the host runs the handler, and the wait goes on."""
    comm = Comm()
    if comm.rank == 0:
        posted = post(comm, [[1] * comm.world for _ in range(comm.world)], 0)
        seen = []
        own = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with interruptible():
            assert comm.wait(posted[2], 1.0) == TIMED_OUT
        timer.join()
        assert seen == [1]
        signal.signal(signal.SIGINT, own)
        meeting.say("interrupted")
    meeting.hear("interrupted", [0])  # a peer that ends would end the wait too
    comm.destroy()
    meeting.part(range(dist.get_world_size()))


def close_unfinished():
    """Destroying a communicator whose messages are outstanding neither hangs nor crashes."""
    comm = Comm()
    dist.barrier()  # a rank may still be connecting when another one is through
    table = [[1 << 16] * comm.world for _ in range(comm.world)]
    if comm.rank == 0:
        post(comm, table, 0)
        comm.destroy()
        meeting.say("closed")
    meeting.hear("closed", [0])
    if comm.rank != 0:
        comm.destroy()
    meeting.part(range(comm.world))


# By job, which checks and describes a claim: the number of ranks.
JOBS = {uneven: 3, late: 3, threadless: 2, aborted_elsewhere: 2, others_handler: 2, close_unfinished: 2}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_Job_OnSoManyRanks_HoldsWhatItChecks(job):
    ranks.run(JOBS[job], job)


@pytest.mark.parametrize("posted_first", [True, False])
def test_Wait_PeerIsKilled_IsLostByNameSoon(posted_first):
    ended = ranks.finish(ranks.start(3, dead, posted_first=posted_first))
    assert ended[-1].code == -9
    for end in ended[:-1]:
        assert end.error is None, end.error
        status, took, (peer, text), again = end.result
        assert status == PEER_LOST and took < SOON, (status, took, peer, text)
        # The killed rank, or one that learnt of it first and closed its connections.
        assert peer >= 0 and text
        assert again in (PEER_LOST, ABORTED)
    assert any(end.result[2][0] == 2 for end in ended[:-1])


def test_Abort_AfterSilence_EndsAllRanksSoon():
    results = ranks.run(3, silent)
    (status0, took0, why0), (status1, took1, why1), (status2, _, why2) = results
    assert status0 == TIMED_OUT and why0[0] in (1, 2) and took0 < SOON, results[0]
    assert status1 == PEER_LOST and took1 < SOON, results[1]
    assert status2 == PEER_LOST, results[2]
