# SPDX-License-Identifier: Apache-2.0
"""Tests that restore policies in Python are those of the loaded library."""

import json

from sluice import restore
from sluice._library import load
from sluice._restore_table import TABLE


def test_Table_IsTheLibrarysOwn():
    library = load()
    assert (
        json.loads(library.text(library.lib.sluice_restore_policies_json)) == TABLE
        and len(restore.POLICIES) == len(TABLE["policies"]) >= 4
    )


def test_Numbers_AreThoseOfTheHeader():
    lib = load().lib
    for name, policy in restore.POLICIES.items():
        assert getattr(lib, f"SLUICE_RESTORE_{name.upper()}") == policy.number
    assert (lib.SLUICE_RESTORE_ADAPTIVE, lib.SLUICE_RESTORE_BY_CHUNK) == (restore.ADAPTIVE, restore.BY_CHUNK)
    assert restore.name_of(restore.BY_CHUNK) == "by chunk" and restore.name_of(restore.ADAPTIVE) is None
