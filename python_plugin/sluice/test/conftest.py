# SPDX-License-Identifier: Apache-2.0
"""Provides fixtures that run a command, and a planning command over a file."""

import json

import pytest
from sluice import __main__ as entry


@pytest.fixture
def command(capsys):
    """command(*words) runs `sluice WORDS`: (exit status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        status = entry.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def plan(command, tmp_path):
    """plan(option, data, *words) runs `sluice plan OPTION FILE WORDS` over a file with this data, JSON or text: (exit
    status, stdout, stderr)."""

    def call(option: str, data: object, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "model.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return command("plan", option, str(path), *words)

    return call
