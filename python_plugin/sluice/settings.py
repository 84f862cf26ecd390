"""Options for hosts that have no config section of ours: `sluice.configure(...)`, an attribute, the environment.

The keys are those of the "sluice" section (see config.py). Where several say something, the later in this list counts:
`sluice.configure`, the section that the host's own config carries, SLUICE_OPTIONS (a JSON object).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sluice import config

ENVIRONMENT = "SLUICE_OPTIONS"

_configured: dict[str, Any] = {}
# Counts calls of `configure`: who keeps what `effective` said asks again when it has changed.
version = 0


def configure(**section: Any) -> None:
    """Sets options for every layer that Sluice runs in this process from now on; `configure()` forgets them.

    Raises config.ConfigError for unknown keys and bad values. Call it alike on all ranks.
    """
    global version
    config.parse(section)
    _configured.clear()
    _configured.update(section)
    version += 1


def effective(section: Any = None, environ: Mapping[str, str] | None = None) -> config.Options | None:
    """The options of a layer that its host has given to Sluice; None: SLUICE=0 or `enabled=False` leave it stock."""
    environ = os.environ if environ is None else environ
    if section is not None and not isinstance(section, Mapping):
        config.parse(section)
    merged = {**_configured, **(section or {}), **_from_environment(environ)}
    if merged.get("enabled") is False:
        config.parse(merged)
        return None
    return config.resolve({**merged, "enabled": True}, environ)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(ENVIRONMENT, "").strip()
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise config.ConfigError(f'{ENVIRONMENT} must be a JSON object such as {{"chunks": 4}}: {error}') from None
    if not isinstance(found, dict):
        raise config.ConfigError(f'{ENVIRONMENT} must be a JSON object such as {{"chunks": 4}}, not {text}')
    return found
