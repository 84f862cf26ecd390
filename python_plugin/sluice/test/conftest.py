# SPDX-License-Identifier: Apache-2.0
"""Provides a fixture that runs a planning command over a file."""

import json

import pytest
from sluice import __main__ as entry


@pytest.fixture
def plan(capsys, tmp_path):
    """plan(option, data, *words) runs `sluice plan OPTION FILE WORDS` over a file with this data, JSON or text: (exit
    status, stdout, stderr)."""

    def call(option: str, data: object, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "model.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        status = entry.main(["plan", option, str(path), *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
