# SPDX-License-Identifier: Apache-2.0
"""What the layers of a host run with: sections of several origins as one, the environment's word for all of them.

Of what several say, the later in this list counts, key by key (an object such as "tuner" as a whole): the model's own
config or the layer's spec, `sluice.configure`, SLUICE_OPTIONS (a JSON object, or a file that holds one). Which keys
each may have is in options.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sluice import config, file_trust, origins
from sluice.options import CONFIGURE, DS_CONFIG, ENVIRONMENT, MODEL

_configured: dict[str, Any] = {}
# Counts calls of `configure`: who keeps what `effective` said asks again when it has changed.
version = 0


def configure(**section: Any) -> None:
    """Sets options for every layer that Sluice runs in this process from now on; `configure()` forgets them.

    Raises config.ConfigError for unknown keys and bad values. Call it alike on all ranks.
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
    """The options of a layer whose host has no config for all layers; None: SLUICE=0 or `enabled=False` leave it stock.

    section  what comes with the layer
    origin   from where: MODEL, which may be a stranger's, or SPEC
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
    """The options of DeepSpeed's layers by the section of its config (None: it has none); None leaves them stock."""
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
    """What the file says that the environment names."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:  # of no such path, and of what is no text
        raise config.ConfigError(
            f'{ENVIRONMENT} must be a JSON object such as {{"chunks": 4}}, or the path of a file that holds '
            f"one; {path!r} is neither: {getattr(error, 'strerror', None) or error}"
        ) from None
    file_trust.warn(path)
    return text
