"""What the ranks of test_exchange.py do: the callbacks of c10d_comm.cpp alone, without libsluice."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from sluice._sluice_abi import ffi
from sluice.adapters.torch._native import interruptible, native

OK, PEER_LOST, TIMED_OUT, ABORTED = 0, -10, -11, -12


class Comm:
    """The callback table over a gloo group of its own."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(list(range(self.world)), backend="gloo", use_local_synchronization=True)
        self.vtable, self.user = native().open_group(SimpleNamespace(ffi=ffi), self.group.group_name)
        self.failure = ffi.new("sluice_host_failure_t *")

    def start(self, send, recv):
        """send, recv: a byte tensor per rank. Returns (status, request)."""
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
    """bytes[from][to]: uneven, with zeros; the diagonal must never be read."""
    return [[((7 * s + 3 * r + turn) % 5) * (1 + 1000 * ((s + turn) % 3)) for r in range(world)] for s in range(world)]


def pattern(sender, receiver, count, turn):
    """Bytes that carry sender, receiver and place."""
    return ((torch.arange(count) * 31 + sender * 7 + receiver * 13 + turn) % 251).to(torch.uint8)


def blocks(comm, table, turn):
    """What this rank sends, and where it receives: table[from][to] bytes."""
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
    assert comm.wait(request, 30) == OK, comm.why()
    for peer in range(comm.world):
        if peer == comm.rank:
            assert bool((recv[peer] == 255).all())
        else:
            assert torch.equal(recv[peer], pattern(peer, comm.rank, recv[peer].numel(), turn)), (peer, turn)


def uneven():
    comm = Comm()
    began = time.monotonic()
    for turn in range(100):
        check(comm, post(comm, sizes(comm.world, turn), turn))
    took = (time.monotonic() - began) / 100
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
    return took


def late(seconds):
    """The last rank comes late: waits expire, name it, live on, and succeed."""
    comm = Comm()
    last = comm.world - 1
    table = [[64] * comm.world for _ in range(comm.world)]
    expiries = []
    if comm.rank == last:
        time.sleep(seconds)
        check(comm, post(comm, table, 0))
    else:
        posted = post(comm, table, 0)
        while True:
            began = time.monotonic()
            status = comm.wait(posted[2], 0.3)
            if status == OK:
                break
            assert status == TIMED_OUT, (status, comm.why())
            expiries.append((time.monotonic() - began, *comm.why()))
        assert torch.equal(posted[1][last], pattern(last, comm.rank, 64, 0))
    for turn in range(3):  # the group is as good as new
        check(comm, post(comm, table, turn))
    comm.destroy()
    dist.barrier()
    return expiries


def dead(posted_first):
    """The last rank is killed after the others posted, or before; they learn it soon, by name, and cannot start more.

    A message posted after the death may be refused at once or fail in the wait: both are right.
    """
    comm = Comm()
    last = comm.world - 1
    table = [[1 << 20] * comm.world for _ in range(comm.world)]
    check(comm, post(comm, table, 0))
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == last:
        store.wait([f"{'posted' if posted_first else 'ready'}{rank}" for rank in range(last)])
        store.set("killed", "")
        os.kill(os.getpid(), signal.SIGKILL)
    send, recv = blocks(comm, table, 1)
    if not posted_first:
        store.set(f"ready{comm.rank}", "")
        store.wait(["killed"])
        time.sleep(0.5)  # the news of its end is on its way
    status, request = comm.start(send, recv)
    assert status == OK or not posted_first, (status, comm.why())
    store.set(f"posted{comm.rank}", "")
    began = time.monotonic()
    if status == OK:
        status = comm.wait(request, 30)
    took = time.monotonic() - began
    why = comm.why()
    again, _ = comm.start(send, recv)
    comm.destroy()
    store.set(f"done{comm.rank}", "")
    if comm.rank == 0:  # holds the store
        store.wait([f"done{rank}" for rank in range(last)])
    return status, took, why, again


def silent():
    """Rank 0 gives up on a silent peer: after its abort every rank learns of it at once."""
    comm = Comm()
    table = [[128] * comm.world for _ in range(comm.world)]
    if comm.rank == comm.world - 1:
        time.sleep(2.5)  # silent, but alive
        status, request = comm.start(
            [torch.zeros(128, dtype=torch.uint8)] * comm.world, [torch.zeros(128, dtype=torch.uint8)] * comm.world
        )
        if status == OK:
            status = comm.wait(request, 10)
        why = comm.why()
        comm.destroy()
        return status, 0.0, why
    posted = post(comm, table, 0)
    if comm.rank == 0:
        status = comm.wait(posted[2], 0.7)
        assert status == TIMED_OUT, (status, comm.why())
        why = comm.why()
        began = time.monotonic()
        comm.vtable.abort(comm.user)
        comm.vtable.abort(comm.user)
        assert comm.wait(posted[2], 5) == ABORTED, comm.why()
        assert comm.start(posted[0], posted[1])[0] == ABORTED
    else:
        began = time.monotonic()
        status = comm.wait(posted[2], 20)
        why = comm.why()
    took = time.monotonic() - began
    comm.destroy()
    time.sleep(2.5)
    return status, took, why


def aborted_elsewhere():
    """Another thread aborts while this one waits."""
    comm = Comm()
    table = [[1] * comm.world for _ in range(comm.world)]
    result = (None, 0.0)
    if comm.rank == 0:
        posted = post(comm, table, 0)
        timer = threading.Timer(0.5, lambda: comm.vtable.abort(comm.user))
        timer.start()
        began = time.monotonic()
        status = comm.wait(posted[2], 30)
        result = (status, time.monotonic() - began)
        timer.join()
    else:
        time.sleep(2)
    comm.destroy()
    return result


def interrupted():
    """Ctrl-C while the main thread is inside a call that waits, and once more with a handler of the host's own."""
    comm = Comm()
    table = [[1] * comm.world for _ in range(comm.world)]
    if comm.rank != 0:
        time.sleep(4)
        comm.destroy()
        return None
    posted = post(comm, table, 0)
    seen = []
    own = signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with interruptible():
        status = comm.wait(posted[2], 1.0)
    assert status == TIMED_OUT and len(seen) == 1, (status, seen)
    signal.signal(signal.SIGINT, own)

    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    raised = False
    try:
        with interruptible():
            status = comm.wait(posted[2], 30)
    except KeyboardInterrupt:
        raised = True
    took = time.monotonic() - began
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    comm.destroy()
    return raised, took


def close_unfinished():
    """Destroying a communicator whose messages are outstanding neither hangs nor crashes."""
    comm = Comm()
    dist.barrier()  # a rank may still be connecting when another one is through
    table = [[1 << 16] * comm.world for _ in range(comm.world)]
    if comm.rank == 0:
        post(comm, table, 0)
        comm.destroy()
    else:
        time.sleep(1)
        comm.destroy()
    return True
