# SPDX-License-Identifier: Apache-2.0
"""Loads libsluice, once per process.

The module `sluice._sluice_abi` describes the ABI. The packaging writes it from the C headers, so loading needs neither
a compiler nor a parser. The library is in `sluice/lib`; SLUICE_LIBRARY names another one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from . import file_trust
from .errors import AbiMismatch, LibraryNotFound, OverBudget, SluiceError, from_status

ENVIRONMENT = "SLUICE_LIBRARY"
FILE_NAME = "libsluice.so.0"
REINSTALL = "run `.venv/bin/python python_plugin/packaging/install.py` in the checkout, or reinstall the wheel"


class Library:
    """Has the loaded library: `ffi` makes and reads C values, `lib` has the functions."""

    def __init__(self, ffi: Any, lib: Any, path: str, version: tuple[int, int, int]) -> None:
        self.ffi = ffi
        self.lib = lib
        self.path = path
        self.version = version

    def new(self, name: str) -> Any:
        """Returns a `sluice_<name>_t` with its defaults."""
        value = self.ffi.new(f"sluice_{name}_t *")
        getattr(self.lib, f"sluice_{name}_init")(value, self.ffi.sizeof(value[0]))
        return value

    def last_error(self, status: int) -> SluiceError:
        """Returns the exception for a call of this thread that has just returned `status`."""
        info = self.new("error_info")
        self.lib.sluice_error_last(info)
        message = self.ffi.string(info.message).decode(errors="replace")
        if info.status != status or not message:
            message = message or "no details"
        return from_status(status, message, info.peer, info.native_code)

    def check(self, status: int) -> None:
        """Raises unless the call succeeded."""
        if status != 0:
            raise self.last_error(status)

    def shortfall(self, status: int) -> str:
        """Returns the message of OverBudget, and "" if the call succeeded. Raises other errors."""
        try:
            self.check(status)
        except OverBudget as error:
            return error.message
        return ""

    def text(self, write: Any, *arguments: Any) -> str:
        """Returns the text that a function of the library writes. Its first call returns the length."""
        size = self.ffi.new("uint64_t *")
        self.check(write(*arguments, self.ffi.NULL, size))
        text = self.ffi.new("char[]", size[0])
        self.check(write(*arguments, text, size))
        return str(self.ffi.string(text).decode())


def library_path() -> str:
    """Returns the path of the file that `load` opens."""
    named = os.environ.get(ENVIRONMENT)
    return named or os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", FILE_NAME)


def header_version(ffi: Any) -> tuple[int, int, int]:
    major, minor, patch = (ffi.integer_const(f"SLUICE_VERSION_{part}") for part in ("MAJOR", "MINOR", "PATCH"))
    return major, minor, patch


@functools.cache
def load() -> Library:
    """Opens the library. Raises LibraryNotFound or AbiMismatch, which say what to do."""
    try:
        from ._sluice_abi import ffi
    except ImportError as error:
        raise LibraryNotFound(f"sluice is not completely installed ({error}): {REINSTALL}") from error
    path = library_path()
    remedy = f"unset {ENVIRONMENT}, or set it to a {FILE_NAME}" if os.environ.get(ENVIRONMENT) else REINSTALL
    if not os.path.exists(path):
        raise LibraryNotFound(f"{path} does not exist: {remedy}")
    if os.environ.get(ENVIRONMENT):
        file_trust.warn(path)
    try:
        lib = ffi.dlopen(path)
        numbers = ffi.new("int32_t[3]")
        lib.sluice_version(numbers, numbers + 1, numbers + 2)
    except (OSError, AttributeError) as error:
        raise LibraryNotFound(f"{path} does not load as libsluice ({error}): {remedy}") from error
    version = (numbers[0], numbers[1], numbers[2])
    expected = header_version(ffi)
    # Before 1.0 a minor version may change anything.
    if version[:2] != expected[:2]:
        text = "{} is version {}.{}.{}, but this package was made for {}.{}".format(path, *version, *expected[:2])
        raise AbiMismatch(f"{text}: {remedy}")
    return Library(ffi, lib, path, version)
