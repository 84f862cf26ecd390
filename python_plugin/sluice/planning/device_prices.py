# SPDX-License-Identifier: Apache-2.0
"""Reads what calls and kernels of a GPU cost: from a file of the folder `prices`, or from a file of the user.

prices/README.md says when the files may change.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files, machines
from .errors import BadInput

FOLDER = Path(__file__).resolve().parent / "prices"
# Every number that the clock reads, by section. A section without names has numbers with any name.
SECTIONS: dict[str, tuple[str, ...]] = {
    "floor": ("flops_per_second", "bytes_per_second"),
    "host": (
        *("launch", "copy", "fill", "record", "wait", "messages", "message", "header", "single", "lt", "grouped"),
        *("synchronize", "query", "query_period", "drain", "call"),
    ),
    "kernel": ("least_seconds", "bytes_per_second", "issue_per_second"),
    "link": ("bytes_per_second", "start_seconds", "sms"),
    "copy": ("least_seconds", "device", "to_host", "to_device", "fill"),
}
KERNEL = ("elements", "step_seconds", "instructions", "warps_per_sm")
ENTRIES = ("single", "lt", "grouped")
ENTRY = ("flops_per_second", "tile_seconds")


@dataclass(frozen=True)
class Prices:
    """Has the prices of a device. data: the checked content of the file."""

    data: dict[str, Any]
    where: str

    @property
    def device(self) -> str:
        return str(self.data["device"])

    def kernel(self, name: str) -> dict[str, Any]:
        """Returns the price of a kernel, by the longest prefix of its name that has a price."""
        bare = name.removeprefix("sluice_")
        found = max((key for key in self.data["kernels"] if bare.startswith(key)), key=len, default=None)
        if found is None:
            raise BadInput(f"prices {self.where}: kernel {bare} has no price: add it to 'kernels' (docs/tools.md)")
        return dict(self.data["kernels"][found])


def names() -> list[str]:
    """Devices with prices."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path: str) -> Prices:
    """Reads prices of a device by name, or from a file."""
    path = FOLDER / f"{name_or_path.lower()}.json"
    if name_or_path.lower() not in names():
        path = Path(name_or_path)
        if not path.is_file():
            raise BadInput(_unknown(name_or_path))
    data = files.from_json(f"prices {name_or_path}: ", files.read(f"prices {name_or_path}", path))
    _check(data, name_or_path)
    return Prices(data, os.fspath(name_or_path))


def _unknown(name: str) -> str:
    """Returns the message for an unknown device. A machine's profile has no prices of a device's calls."""
    there = f"there are prices of {', '.join(names())}; or name a file of your own in their form"
    for profile in machines.names():
        words = json.loads((machines.FOLDER / f"{profile}.json").read_text()).get("devices", [])
        if name == profile or name.lower() in (word.lower() for word in words):
            return f"--device {name}: profile {profile} has no prices of a device's calls: {there}"
    return f"--device {name!r}: neither a device with prices nor a file: {there}"


def _number(data: Any, where: str, *keys: str) -> None:
    value = data
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadInput(f"prices {where}: no price for {'.'.join(keys)}: it must be a number above 0 (docs/tools.md)")


def _check(data: Any, where: str) -> None:
    if not isinstance(data, dict) or data.get("sluice_device_prices") != 1:
        raise BadInput(f'prices {where}: not a file of prices: it has no "sluice_device_prices": 1 (docs/tools.md)')
    if not isinstance(data.get("device"), str) or not isinstance(data.get("kernels"), dict):
        raise BadInput(f"prices {where}: 'device', a name, and 'kernels', an object, are needed (docs/tools.md)")
    for key in ("device_bytes", "sms"):
        _number(data, where, key)
    for section, keys in SECTIONS.items():
        for key in keys:
            _number(data, where, section, key)
    for kernel, price in data["kernels"].items():
        for key in KERNEL:
            _number(data, where, "kernels", kernel, key)
        if not isinstance(price.get("kind"), str):
            raise BadInput(f"prices {where}: kernels.{kernel} has no 'kind', such as rows (docs/tools.md)")
    for key in ("call_seconds", "bytes_per_second"):
        _number(data, where, "gemm", key)
    for entry in ENTRIES:
        for key in ENTRY:
            _number(data, where, "gemm", entry, key)
        tiles = data["gemm"][entry].get("tiles")
        is_list = isinstance(tiles, list) and len(tiles) > 0
        if not is_list or not all(isinstance(tile, list) and len(tile) == 3 and min(tile) > 0 for tile in tiles):
            raise BadInput(f"prices {where}: gemm.{entry}.tiles must be a list of [rows, columns, share of the peak]")
