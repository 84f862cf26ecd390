# SPDX-License-Identifier: Apache-2.0
"""Tests loading libsluice, and its errors as exceptions. Each case has its own process, since loading happens once."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from sluice import errors
from sluice._library import load


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ, **environment), capture_output=True, text=True, timeout=250
    )
    return done.stdout + done.stderr


LOAD = "from sluice._library import load\ntry: print('loaded', load().path)\nexcept Exception as e: print(repr(e))"


def test_Library_AsInstalled_LoadsWithoutTorch():
    text = python(LOAD + "\nimport sys; print('torch' in sys.modules, 'cffi.cparser' in sys.modules)")
    assert text.startswith("loaded ") and text.endswith("False False\n"), text


def test_Library_NamedFileIsAbsent_SaysWhatToDo():
    text = python(LOAD, SLUICE_LIBRARY="/nowhere/libsluice.so.0")
    assert "LibraryNotFound" in text and "/nowhere/libsluice.so.0" in text and "unset SLUICE_LIBRARY" in text


def test_Library_NamedFileIsSomethingElse_SaysSo(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library")
    assert "does not load as libsluice" in python(LOAD, SLUICE_LIBRARY=str(path))


def test_Library_OtherVersion_IsRefused(tmp_path):
    source = tmp_path / "fake.c"
    source.write_text("void sluice_version(int* a, int* b, int* c) { *a = 7; *b = 3; *c = 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "fake.so", source], check=True)
    text = python(LOAD, SLUICE_LIBRARY=str(tmp_path / "fake.so"))
    assert "AbiMismatch" in text and "version 7.3.1" in text and "made for" in text


def test_Library_DescriptionIsMissing_SaysReinstall():
    hide = "import sys; sys.modules['sluice._sluice_abi'] = None\n"
    text = python(hide + LOAD)
    assert "LibraryNotFound" in text and "install.py" in text


def test_Errors_EveryStatusOfTheHeader_HasItsClass():
    ffi = load().ffi
    for number, name in errors.STATUS_NAMES.items():
        assert ffi.integer_const("SLUICE_OK" if number == 0 else f"SLUICE_E_{name}") == number
        if number < 0:
            error = errors.from_status(number, "what", peer=3)
            assert error.status == number and error.status_name == name and error.peer == 3
            assert str(error) == f"{name}: what" and type(error) is not errors.SluiceError
    assert ffi.string(load().lib.sluice_status_name(min(errors.STATUS_NAMES) - 1)) == b"UNKNOWN"


def test_Errors_OfABrokenCommunicator_AdviseTheHost():
    text = str(errors.from_status(-10, f"gone. This communicator is broken: {errors.COMM_REMEDY}. (tcp)"))
    assert text == f"PEER_LOST: gone. This communicator is broken: {errors.HOST_REMEDY}. (tcp)"
    header = Path(__file__).parents[3] / "backend" / "comm" / "comm.h"
    assert f'#define SLUICE_COMM_REMEDY "{errors.COMM_REMEDY}"' in header.read_text()


def test_Errors_Pickled_KeepWhatTheySay():
    error = pickle.loads(pickle.dumps(errors.PeerLost("gone", peer=2, native_code=5)))
    assert type(error) is errors.PeerLost and (error.message, error.peer, error.native_code) == ("gone", 2, 5)


def test_Errors_OfACall_CarryTheLibrarysWords():
    library = load()
    with pytest.raises(errors.InvalidArgument, match="moe is NULL"):
        library.check(
            library.lib.sluice_moe_forward(library.ffi.NULL, library.ffi.NULL, library.ffi.NULL, library.ffi.NULL)
        )
