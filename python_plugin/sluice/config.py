# SPDX-License-Identifier: Apache-2.0
"""Reads the "sluice" section of a host's config, and the environment variable that overrides it.

    "sluice": {"enabled": true, "chunks": 4}

Sluice chooses the value of a key that is absent or `null`. The word "auto" is refused because some trainers rewrite it.
sluice.options has the values of each key. This module loads no library: every process that builds an engine imports it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.option_values import CALIBRATION_SECONDS, ConfigError, the_word_auto
from sluice.options import ADAPTIVE_PLAN, TABLE, Options, PipelineOptions, PlacementOptions, Policy, TunerOptions

__all__ = [
    "ADAPTIVE_PLAN",
    "CALIBRATION_SECONDS",
    "ConfigError",
    "Options",
    "PipelineOptions",
    "PlacementOptions",
    "TunerOptions",
]

ENVIRONMENT = "SLUICE"
KEYS = tuple(TABLE)


def parse(section: Any) -> tuple[bool, Options]:
    """Returns (enabled, options) of a section. ConfigError names the first error."""
    if not isinstance(section, Mapping):
        raise not_an_object(section)
    for key in section:
        check_key(key)
    values: dict[str, Any] = {}
    for key, row in TABLE.items():
        value = section.get(key)
        if isinstance(value, str) and value.strip().lower() == "auto":
            raise the_word_auto(key, "leave the key out or write null and Sluice chooses")
        if value is not None:
            values[key] = row.read(key, value)
    if "policy" in values:
        values["policy"] = for_chunks(values["policy"], values.get("chunks"))
    enabled = bool(values.pop("enabled", False))
    if values.get("reuse") and values.get("policy") is not None:
        raise ConfigError(
            '"sluice": "reuse" has Sluice choose among S1 to S4, and "policy" names one: remove one of them '
            "(a policy reuses buffers by itself)"
        )
    if "gemm_library" in values and values.get("gemm") not in ("onednn", "blas"):
        raise ConfigError('"sluice": "gemm_library" needs "gemm": "onednn" or "blas" as well')
    return enabled, Options(**values)


def for_chunks(policy: Policy | None, chunks: int | None) -> Policy | None:
    """Checks that lists have one entry per chunk, and replaces a list of equal entries by the entry."""
    if policy is None:
        return None
    for name, one in zip(TABLE["policy"].parts, policy):
        if isinstance(one, str) or len(one) == chunks:
            continue
        remedy = f"give {chunks}" if chunks else f'also write "chunks": {len(one)}'
        raise ConfigError(
            f'"sluice": "policy.{name}" names {len(one)} chunks, and "chunks" is {chunks or "adaptive"}: {remedy}'
        )
    first, second = (one[0] if not isinstance(one, str) and len(set(one)) == 1 else one for one in policy)
    return first, second


def resolve(section: Any, environ: Mapping[str, str] | None = None) -> Options | None:
    """Returns the options for a host whose config has this section (None: no section). None leaves the host alone.

    SLUICE=0 switches Sluice off and ignores the config. SLUICE=1 switches it on. SLUICE=require switches it on, and a
    layer that cannot run on Sluice is an error. Other values are errors.
    """
    word = switch(environ)
    if word == "0":
        return None
    enabled, options = parse({} if section is None else section)
    if not enabled and not word:
        return None
    if word == "require":
        return replace(options, on_unsupported="error", required=True)
    return options


def switch(environ: Mapping[str, str] | None = None) -> str:
    """Returns the value of SLUICE in the environment: "", "0", "1" or "require"."""
    word = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip().lower()
    if word not in ("", "0", "1", "require"):
        raise ConfigError(f"{ENVIRONMENT}={word!r} is not known: write 0, 1 or require, or unset it")
    return word


def misspelt_section(keys: Any) -> str | None:
    """Returns a top-level key that looks like a misspelt "sluice", as DeepSpeed silently ignores unknown keys."""
    names = [key for key in keys if isinstance(key, str) and key != "sluice"]
    found = difflib.get_close_matches("sluice", [name.lower() for name in names], n=1, cutoff=0.8)
    return next((name for name in names if name.lower() == found[0]), None) if found else None


def not_an_object(section: Any) -> ConfigError:
    return ConfigError(f'"sluice" must be an object such as {{"enabled": true}}, not {section!r}')


def check_key(key: Any) -> None:
    """Raises ConfigError if the section has no such key."""
    if key in KEYS:
        return
    near = difflib.get_close_matches(str(key).lower(), KEYS, n=1, cutoff=0.0)
    raise ConfigError(f'"sluice": unknown key {key!r}: did you mean "{near[0]}"? Valid keys: {", ".join(KEYS)}')
