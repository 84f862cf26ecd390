# SPDX-License-Identifier: Apache-2.0
"""Merges the options of a layer from their origins; SLUICE in the environment overrides all of them.

If several origins set a key, the later in this list wins (an object such as "tuner" is one value): the model's own
config or the layer's spec, `sluice.configure`, SLUICE_OPTIONS (a JSON object, or a file that holds one). options.py has
the keys that each origin may set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sluice import config, file_trust, origins
from sluice.options import CONFIGURE, DS_CONFIG, ENVIRONMENT, MODEL

_configured: dict[str, Any] = {}
# The number of calls of `configure`. Code that caches the result of `effective` calls it again when this changes.
version = 0


def configure(**section: Any) -> None:
    """Sets options for every layer that Sluice runs in this process from now on; `configure()` forgets them.

    Raises config.ConfigError for unknown keys and bad values. Call it with the same options on all ranks.
    """
    global version
    given = origins.taken(section, CONFIGURE)
    config.parse(given)
    _configured.clear()
    _configured.update(given)
    version += 1


def effective(
    section: Any = None, environ: Mapping[str, str] | None = None, origin: str = MODEL
) -> config.Options | None:
    """Returns the options of a layer whose host has no config for all layers; None (SLUICE=0, `enabled=False`): stock.

    section  the section that comes with the layer
    origin   MODEL, whose author is not trusted, or SPEC
    """
    environ = os.environ if environ is None else environ
    if config.switch(environ) == "0":
        return None
    model = origins.taken(section, origin)
    merged = {**model, **_configured, **_from_environment(environ)}
    if merged.get("enabled") is False:
        config.parse(merged)
        return None
    return config.resolve({**merged, "enabled": True}, environ)


def of_ds_config(section: Any, environ: Mapping[str, str] | None = None) -> config.Options | None:
    """Returns the options of DeepSpeed's layers from the section of its config (None: no section); None: stock."""
    if config.switch(environ) == "0":
        return None
    return config.resolve(origins.taken(section, DS_CONFIG), environ)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(ENVIRONMENT, "").strip()
    if not text:
        return {}
    where = ENVIRONMENT
    if not text.startswith(("{", "[")):
        where, text = f"{where}={text}", _file(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise config.ConfigError(f'{where} must hold a JSON object such as {{"chunks": 4}}: {error}') from None
    if not isinstance(found, dict):
        raise config.ConfigError(f'{where} must hold a JSON object such as {{"chunks": 4}}, not {text}')
    return origins.taken(found, ENVIRONMENT)


def _file(path: str) -> str:
    """Returns the text of the file that SLUICE_OPTIONS names."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:  # the path does not exist, or the file is not text
        raise config.ConfigError(
            f'{ENVIRONMENT} must be a JSON object such as {{"chunks": 4}}, or the path of a file that holds '
            f"one; {path!r} is neither: {getattr(error, 'strerror', None) or error}"
        ) from None
    file_trust.warn(path)
    return text
