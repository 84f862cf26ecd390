# SPDX-License-Identifier: Apache-2.0
"""Sends in both directions at once, or messages after pauses; ranks print when they received. Both ranks of link_test
run it.

It uses plain sockets without torch, because the test measures the link, not a library.
"""

import os
import socket
import sys
import threading
import time

BLOCK = bytes(1 << 18)
STAMP = 32  # bytes of a message's header: the time at which it was sent, by the clock of both ends
MESSAGES = 10


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


def _receive(peer: socket.socket, total: int) -> bytearray:
    data = bytearray()
    while len(data) < total:
        part = peer.recv(min(1 << 20, total - len(data)))
        if not part:
            raise SystemExit("the peer left early")
        data += part
    return data


def _send(peer: socket.socket, total: int) -> None:
    sent = 0
    while sent < total:
        sent += peer.send(BLOCK[: total - sent])


def both_ways(peer: socket.socket, total: int) -> None:
    """Sends these bytes each way, and prints when receiving began and ended."""
    sender = threading.Thread(target=_send, args=(peer, total))
    begin = time.monotonic()
    sender.start()
    _receive(peer, total)
    end = time.monotonic()
    sender.join()
    # Both ends read one clock: otherwise a late rank would find bytes waiting, and measure a faster link.
    print(f"span {begin:.6f} {end:.6f}", flush=True)


def after_pauses(peer: socket.socket, total: int, is_sender: bool) -> None:
    """Sends messages of these bytes after pauses; the receiver prints how long each took."""
    for _ in range(MESSAGES):
        if is_sender:
            time.sleep(0.03)
            peer.sendall(time.monotonic().hex().encode().ljust(STAMP) + bytes(total - STAMP))
        else:
            sent = float.fromhex(_receive(peer, total)[:STAMP].decode().strip())
            print(f"took {time.monotonic() - sent:.6f}", flush=True)
    if is_sender:
        peer.recv(1)  # until the other has closed


def main() -> None:
    total, rank = int(sys.argv[1]), int(os.environ["RANK"])
    with connect(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1) as peer:
        if sys.argv[2:] == ["pauses"]:
            after_pauses(peer, total, rank == 0)
        else:
            both_ways(peer, total)


if __name__ == "__main__":
    main()
