# SPDX-License-Identifier: Apache-2.0
"""Sends in both directions at once; each rank prints when it received. Both ranks of link_test run it.

It uses plain sockets without torch, because the test measures the link, not a library.
"""

import os
import socket
import sys
import threading
import time

BLOCK = bytes(1 << 18)


def connect(rank: int, address: str, port: int) -> socket.socket:
    if rank == 0:
        with socket.create_server((address, port)) as server:
            return server.accept()[0]
    for _ in range(2000):
        try:
            return socket.create_connection((address, port))
        except OSError:
            time.sleep(0.05)
    raise SystemExit("no connection")


def _send(peer: socket.socket, total: int) -> None:
    sent = 0
    while sent < total:
        sent += peer.send(BLOCK[: total - sent])


def main() -> None:
    """Sends `argv[1]` bytes each way, and prints when receiving began and ended."""
    total = int(sys.argv[1])
    peer = connect(int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
    with peer:
        sender = threading.Thread(target=_send, args=(peer, total))
        begin = time.monotonic()
        sender.start()
        received = 0
        while received < total:
            data = peer.recv(1 << 20)
            if not data:
                raise SystemExit("the peer left early")
            received += len(data)
        end = time.monotonic()
        sender.join()
    # Both ends read one clock: otherwise a late rank would find bytes waiting, and measure a faster link.
    print(f"span {begin:.6f} {end:.6f}", flush=True)


if __name__ == "__main__":
    main()
