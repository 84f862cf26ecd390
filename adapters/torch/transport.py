# SPDX-License-Identifier: Apache-2.0
"""Chooses the connections for the rows of an expert-parallel group on the CPU: Sluice's own over TCP, or gloo's.

The gloo group exists in any case: the ranks find each other through it, and its store shows which rank is silent.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from ...errors import External, NotFound, PeerRefused

# Interfaces that the connections may use, comma-separated; gloo's own variable is read if this one is not set.
INTERFACES = "SLUICE_SOCKET_IFNAME"
_GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
_LONGEST_SECONDS = 30.0


def open_transport(library: Any, host: Any, transport: str | None, connect_timeout: float) -> Any:
    """Opens the communicator that layers use. It takes over `host`, the communicator of the gloo group.

    transport: "tcp", "c10d" (gloo itself), None: tcp if all ranks can reach each other, else c10d with a warning.
    connect_timeout: seconds until all connections are made, at most 30.
    Collective over the group, with the same outcome on all ranks. For "tcp" raises the library's error if it fails.
    """
    if transport == "c10d":
        return host
    ffi = library.ffi
    config = library.new("tcp_config")
    names = os.environ.get(INTERFACES) or os.environ.get(_GLOO_INTERFACES)
    held = ffi.new("char[]", names.encode()) if names else ffi.NULL
    config.interfaces = held
    config.connect_timeout_ns = int(min(connect_timeout, _LONGEST_SECONDS) * 1e9)
    out = ffi.new("sluice_comm_t **")
    try:
        library.check(library.lib.sluice_comm_create_tcp(host, config, out))
    except (NotFound, External, PeerRefused) as error:  # after any other error the gloo group is of no use either
        if transport == "tcp":
            raise
        warnings.warn(
            f"sluice: its own TCP connections are not available, so rows go through gloo, which is slower: {error} "
            f'({INTERFACES} names interfaces; "transport": "c10d" asks for gloo without this warning)',
            stacklevel=2,
        )
        return host
    library.lib.sluice_comm_destroy(host)
    return out[0]
