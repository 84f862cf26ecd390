# SPDX-License-Identifier: Apache-2.0
"""Tests that any JSON, text or bytes in a config, an environment or a file are accepted, or refused by Sluice's errors.

hypothesis makes the same examples in every run; SLUICE_FUZZ_EXAMPLES is a number of other examples to make.
"""

import json
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies
from sluice import config, decision_cache, decision_log, option_values, options, origins
from sluice import settings as sluice_settings

_MORE = os.environ.get("SLUICE_FUZZ_EXAMPLES")
_examples = settings(
    max_examples=int(_MORE or 200),
    derandomize=_MORE is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_WORDS = (
    *config.KEYS,
    *(path.rpartition(".")[2] for path in options.PATHS),
    *option_values.UNITS,
    *{word for row in options.PATHS.values() for word in re.findall(r'"(\w+)"', row.values)},
    *("adaptive", "auto", "S1", "S4", "keep", "offload", "resend", "recompute", "20GiB", "1.5 GB", "9" * 400, "a\0b"),
    *("sluice_decisions", "sluice_kept_decisions", "sluice_last_decisions", "machines", "answers", "entries", "layer"),
    *("rows", "num_chunks", "restore_input", "this machine"),
)
_DEEP = "[" * 20_000  # deeper than any parser allows
_numbers = strategies.one_of(
    strategies.integers(),
    strategies.floats(),
    strategies.sampled_from((0, 1, 2, 3, 4, 256, 257, 1 << 31, 1 << 63, 10**400, -1, 0.5, 1e308, float("inf"))),
)
_leaves = strategies.one_of(
    strategies.none(), strategies.booleans(), _numbers, strategies.text(max_size=12), strategies.sampled_from(_WORDS)
)
_names = strategies.one_of(strategies.sampled_from(_WORDS), strategies.text(max_size=8))
_values = strategies.recursive(
    _leaves,
    lambda inner: strategies.one_of(
        strategies.lists(inner, max_size=4), strategies.dictionaries(_names, inner, max_size=4)
    ),
    max_leaves=12,
)


_sizes = strategies.builds(
    "{}{}".format, strategies.integers(0, 10**400), strategies.sampled_from(("", *option_values.UNITS))
)


def _object_of(names):
    return strategies.dictionaries(strategies.sampled_from(tuple(names)), _values, max_size=4)


_sections = strategies.one_of(
    _values,
    strategies.fixed_dictionaries(
        {},
        optional={
            **{key: _leaves for key in config.KEYS},
            **{key: strategies.one_of(_leaves, _sizes) for key in ("memory_budget", "host_memory_budget")},
            "timeout": _numbers,
            "policy": strategies.one_of(_values, _object_of(options.TABLE["policy"].parts)),
            "tuner": strategies.one_of(_values, _object_of(options.TABLE["tuner"].parts)),
        },
    ),
)
_files = strategies.one_of(
    strategies.binary(max_size=64),
    strategies.binary(max_size=64).map(lambda data: b'{"sluice_kept_decisions"' + data),
    strategies.just(b'{"sluice_decisions": ' + _DEEP.encode()),
    _values.map(lambda value: json.dumps(value).encode()),
    strategies.fixed_dictionaries(
        {"sluice_kept_decisions": strategies.sampled_from((2, 2, 2, 3, "2"))},
        optional={"machines": strategies.dictionaries(_names, _values, max_size=3)},
    ).map(lambda value: json.dumps(value).encode()),
    strategies.fixed_dictionaries(
        {"sluice_last_decisions": strategies.sampled_from((2, 2, 1))},
        optional={"entries": strategies.one_of(_values, strategies.lists(_values, max_size=3))},
    ).map(lambda value: json.dumps(value).encode()),
)
_answers = strategies.lists(
    strategies.fixed_dictionaries({"layer": strategies.text(max_size=16), "rows": strategies.integers(1, 1 << 32)}),
    min_size=1,
    max_size=3,
)


@_examples
@given(_sections)
@example({"memory_budget": "9" * 400})
@example({"timeout": 10**400})
@example({"timeout": float("inf")})
@example({"tuner": {"machine": "a\0b"}})
@example({"tuner": {"cache": "\ud800"}})
def test_Section_AnyJson_IsOptionsOrAConfigError(section):
    try:
        _, found = config.parse(section)
    except config.ConfigError as error:
        assert "sluice" in str(error)
        return
    assert found.full_message().startswith(found.plan_message())
    json.dumps(found.as_dict())
    assert timedelta(seconds=found.timeout or 0) >= timedelta(0)
    for path in (found.gemm_library, *((found.as_dict()["tuner"] or {}).values())):
        if isinstance(path, str):
            assert b"\0" not in os.fsencode(path)  # a file can have that name


@_examples
@given(_sections, strategies.sampled_from((options.DS_CONFIG, options.CONFIGURE, options.ENVIRONMENT, options.MODEL)))
def test_Section_OfAnyOrigin_HasOnlyWhatMayComeFromThere(section, origin):
    try:
        found = origins.taken(section, origin)
    except config.ConfigError:
        return
    for key, value in found.items():
        has_parts = options.TABLE[key].parts and isinstance(value, dict)
        names = [f"{key}.{name}" for name in value] if has_parts else [key]
        assert all(origin in options.PATHS[name].may_come_from for name in names)


@_examples
@example("\0")
@given(strategies.one_of(strategies.text(max_size=40), _sections.map(json.dumps), strategies.just(_DEEP)))
def test_Environment_AnyText_IsOptionsOrAConfigError(text):
    try:
        sluice_settings.effective(None, {"SLUICE_OPTIONS": text})
    except config.ConfigError as error:
        assert str(error)


def _written(tmp_path: Path, name: str, data: bytes) -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


@_examples
@pytest.mark.parametrize("name", ["mine.json", decision_cache.NAME])
@given(data=_files, new=_answers)
def test_KeptDecisions_AnyFile_IsTakenMovedAsideOrLeftAlone(tmp_path, capsys, name, data, new):
    path = _written(tmp_path, name, data)
    texts = []
    try:
        text = decision_cache.take(path, "this machine", texts.append)
        assert not text or texts == [text]
    except decision_cache.NotOurs:
        assert Path(path).read_bytes() == data
    path = _written(tmp_path, name, data)
    decision_cache.merge(path, "this machine", new)
    try:
        known = decision_cache.read(path, "this machine")
    except decision_cache.NotOurs:
        assert Path(path).read_bytes() == data
        return
    assert known[-1] == new[-1]


@_examples
@given(data=_files)
def test_DecisionLog_AnyFile_IsGoneOnWithOrBegunAnew(tmp_path, capsys, data):
    path = _written(tmp_path, decision_log.NAME, data)
    try:
        decision_log.read(path)
    except decision_log.Damaged as problem:
        assert str(problem)
    assert decision_log.append([{"rows": 1}], str(tmp_path)) == path
    assert decision_log.read(path)[-1]["rows"] == 1
