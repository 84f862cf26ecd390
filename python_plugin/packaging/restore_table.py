# SPDX-License-Identifier: Apache-2.0
"""Writes the library's table of restore policies into the package, which checks configs without loading the library."""

import ctypes
import json
import pprint

HEAD = '''"""Written by the packaging; backend/model/restore.c is the source."""

TABLE = '''


def read(library):
    """Returns the parsed JSON of sluice_restore_policies_json."""
    write = ctypes.CDLL(library).sluice_restore_policies_json
    room = ctypes.c_uint64()
    text = None
    for _ in range(2):  # the first call returns the length
        if write(text, ctypes.byref(room)) != 0:
            raise RuntimeError(f"{library} does not tell its restore policies")
        text = text or ctypes.create_string_buffer(room.value)
    return json.loads(text.value)


def emit(library, path):
    with open(path, "w") as file:
        file.write(HEAD + pprint.pformat(read(library), sort_dicts=False, width=110) + "\n")
