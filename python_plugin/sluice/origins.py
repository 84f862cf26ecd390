# SPDX-License-Identifier: Apache-2.0
"""Checks which keys of the "sluice" section each origin of options may set (sluice.options has the table).

The user writes the ds_config, the environment, the specs of layers and the calls of `sluice.configure`. A model's own
config comes with the model, and a downloaded model must not be able to run code of its author (transformers'
`trust_remote_code=False`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sluice import config, option_values
from sluice.options import DS_CONFIG, ENVIRONMENT, MODEL, PATHS, TABLE


def taken(section: Any, origin: str) -> dict[str, Any]:
    """Returns a copy of a section (None: empty). ConfigError names the keys that `origin` may not set.

    Callers use the copy: an arbitrary mapping could return other keys when it is read a second time.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise config.not_an_object(section)
    copied = _copied(section)
    refused = [path for path in _paths(copied) if origin not in PATHS[path].may_come_from]
    if refused:
        raise config.ConfigError(_refusal(refused, origin))
    return copied


def _copied(section: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _copied(value) if isinstance(value, Mapping) else value for key, value in section.items()}


def _paths(section: dict[str, Any]) -> Iterator[str]:
    """Yields the paths of the keys of a section. Unknown keys are errors, as in any section."""
    for key, value in section.items():
        config.check_key(key)
        if TABLE[key].parts and isinstance(value, dict):
            option_values.check_parts(key, value, TABLE[key].parts)
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def _refusal(refused: list[str], origin: str) -> str:
    named = ", ".join(f'"{path}" ({PATHS[path].why})' for path in refused)
    if origin != MODEL:
        allowed = ", ".join(sorted(PATHS[refused[0]].may_come_from)) or "nowhere"
        return f'"sluice": {named} cannot come from {origin}: "{refused[0]}" may come from {allowed}'
    calls = ", ".join(_as_argument(path) for path in refused)
    return (
        f'"sluice": {named} cannot come from {origin} (the section "sluice" of its config.json, config.sluice), which '
        f"may not be trusted: remove it there. If you want it, set it yourself: sluice.configure({calls}) before "
        f"the first call, {ENVIRONMENT} in the environment, or {DS_CONFIG} for DeepSpeed's layers and sluice's tools"
    )


def _as_argument(path: str) -> str:
    key, dot, name = path.partition(".")
    return f'{key}={{"{name}": ...}}' if dot else f"{key}=..."
