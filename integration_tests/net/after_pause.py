# SPDX-License-Identifier: Apache-2.0
"""Sends messages after pauses; the receiver prints how long each took. Each rank of link_test runs it."""

import os
import socket
import sys
import time

from integration_tests.net.throughput import connect

STAMP = 32  # bytes of a message's header: the time at which it was sent, by the clock of both ends
MESSAGES = 10


def _receive(peer: socket.socket, total: int) -> bytes:
    data = bytearray()
    while len(data) < total:
        part = peer.recv(total - len(data))
        if not part:
            raise SystemExit("the peer left early")
        data += part
    return bytes(data)


def main() -> None:
    """Sends messages of `argv[1]` bytes on rank 0, and receives them on the others."""
    total = int(sys.argv[1])
    rank = int(os.environ["RANK"])
    with connect(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1) as peer:
        for _ in range(MESSAGES):
            if rank == 0:
                time.sleep(0.03)
                peer.sendall(time.monotonic().hex().encode().ljust(STAMP) + bytes(total - STAMP))
            else:
                sent = float.fromhex(_receive(peer, total)[:STAMP].decode().strip())
                print(f"took {time.monotonic() - sent:.6f}", flush=True)
        if rank == 0:
            peer.recv(1)  # until the other has closed


if __name__ == "__main__":
    main()
