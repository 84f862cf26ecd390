# SPDX-License-Identifier: Apache-2.0
"""Tests the table of options: what is derived from it, and that a new option is one new row. Also tests the tables of
policies and of the fields of a machine."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sluice
from sluice import config, options, restore
from sluice._library import load
from sluice._restore_table import TABLE
from sluice.adapters.torch import Context, ContextOptions
from sluice.adapters.torch.options import fill
from sluice.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
WRITER = ROOT / "python_plugin" / "packaging" / "option_tables.py"
PARTS = (options.LayerOptions, options.ContextOptions, options.TunerOptions)


def _writer() -> Any:
    spec = importlib.util.spec_from_file_location("option_tables", WRITER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_Manual_HasTheTablesOfThePackage() -> None:
    writer = _writer()
    found = list(writer.pages(ROOT / "docs"))
    assert sorted(name for _, text, _ in found for name in (m[1] for m in writer.BLOCK.finditer(text))) == sorted(
        writer.TABLES
    )
    stale = [str(path) for path, text, wanted in found if text != wanted]
    assert not stale, f"write the tables of {stale} by `.venv/bin/python {WRITER.relative_to(ROOT)}`"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_Table_ColumnsOfC_AreFieldsOfTheConfigAndHoldEveryValue(part: type) -> None:
    """Every word of an option has a number, and the table's default is that of the library, except for deduplicate: by
    default a C program gets the same bits in every run, while Python lets the tuner choose."""
    name = {"LayerOptions": "moe_config", "ContextOptions": "context_config", "TunerOptions": "tuner_config"}
    struct = load().new(name[part.__name__])
    untouched = {field: getattr(struct, field) for field, _ in options.c_fields(part).values()}
    assert untouched
    fill(struct, part())
    chosen = {"deduplicate": 4} if "deduplicate" in untouched else {}
    assert {field: getattr(struct, field) for field in untouched} == untouched | chosen
    for key, row in options.rows_of(part).items():
        words = {word for word in (row.numbers or {}) if isinstance(word, str)}
        said = {word for word in words if f'"{word}"' in row.values}
        assert words - said <= {"adaptive"}, f"{key}: the manual does not name {words - said}"
        for word in words - {"adaptive"}:
            assert row.read(key, word) == word


def test_Config_OfAContext_HasWhatTheOptionsSay() -> None:
    struct = load().new("context_config")
    kept = fill(struct, ContextOptions(gemm="ref", wire_dtype="int8", memory_budget=1 << 30, num_layers=3))
    ffi = load().ffi
    assert len(kept) == 1 and ffi.string(struct.gemm) == b"ref"
    assert (struct.wire_dtype, struct.memory_budget, struct.num_layers, struct.max_outstanding) == (2, 1 << 30, 3, 0)
    with pytest.raises(InvalidArgument, match="wire_dtype 'f8' is unknown: use one of bf16, int8, or leave it out"):
        Context(None, ContextOptions(wire_dtype="f8"))


@pytest.mark.parametrize("part", [*PARTS, options.PipelineOptions, options.PlacementOptions, options.Options])
def test_Options_ByPosition_AreRefused(part: type) -> None:
    assert dataclasses.replace(part()) == part()
    with pytest.raises(TypeError, match="takes options by name: write the name of 'x' before it"):
        part("x")


def test_Doctor_NamesEveryOptionThatIsSet() -> None:
    section = {"chunks": 2, "wgrad_mode": "deferred", "wire_dtype": "bf16", "tuner": {"mode": "profile"}}
    said = config.parse(section)[1].full_message()
    assert said == "chunks 2 | f32 rows travel in bf16 | wgrad_mode deferred | tuner (mode profile)"
    stages = config.parse({"pipeline": {"policy": "gpipe", "in_flight": 4}, "placement": "adaptive"})[1].full_message()
    assert stages == (
        "chunks adaptive | ops of a pipeline run as messages arrive (policy gpipe, in_flight 4) | experts change "
        "ranks where loads differ"
    )


# ---- a new option is a row, and a field of the C config ----

# The C config has this field, and the table does not: only hosts that split backwards set it.
FIELD = "separate_wgrad"
ROW = f'''    {FIELD}: bool = option(
        values.boolean, USER, "it is tried here", "`true`, `false`", "`false`", "a row of a test",
        default=False, c="{FIELD}",
    )
'''
BEFORE = "    shared_memory_budget: int | None = internal("
# A row of layers, which Python would use.
ROW_OF_LAYERS = """    tried: int | None = option(
        values.count, ANYONE, "it is tried here", "a number", "none", "of layers"
    )
"""
BEFORE_OF_LAYERS = "    accumulate: str | None = option("
# The line in which plans read it from a config.
OF_MODEL = ("    chunking: str | None = None\n", "    tried: int | None = None\n")
PROGRAM = f'''
import json, sys
from sluice import config, doctor_config, settings
from sluice._library import load
from sluice.adapters.common.contexts import context_of
from sluice.adapters.torch import ContextOptions, MoeConfig, layer_options
from sluice.adapters.torch.options import fill
from sluice.planning import model, tune_command

def refusal(call):
    try:
        call()
    except config.ConfigError as error:
        return str(error)

enabled, options = config.parse({{"{FIELD}": True, "tried": 3}})
struct = load().new("context_config")
fill(struct, options, ContextOptions)
print(json.dumps({{
    "parsed": options.{FIELD},
    "default": config.parse({{}})[1].{FIELD},
    "wrong": refusal(lambda: config.parse({{"{FIELD}": 3}})),
    "model": refusal(lambda: settings.effective({{"{FIELD}": True}}, {{}})),
    "doctor": [finding.detail for finding in doctor_config.examine(sys.argv[1])],
    "c": struct.{FIELD},
    "context": context_of(options, None).options.{FIELD},
    "layer": MoeConfig(model_width=8, num_experts=1, top_k=1, **layer_options(options, fused=True)).tried,
    "kept": tune_command.options_of(model.read_config(sys.argv[1])).tried,
}}))
'''


def test_NewOption_IsOneRowOfTheTable(tmp_path: Path) -> None:
    package = tmp_path / "sluice"
    shutil.copytree(Path(sluice.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("pictures"))
    table = package / "options.py"
    for row, place in ((ROW, BEFORE), (ROW_OF_LAYERS, BEFORE_OF_LAYERS)):
        before, after = table.read_text().split(place)
        table.write_text(before + row + place + after)
    user = package / "planning" / "model.py"
    user.write_text(user.read_text().replace(OF_MODEL[0], "".join(OF_MODEL)))
    ds_config = tmp_path / "ds_config.json"
    ds_config.write_text(json.dumps({"train_batch_size": 4, "sluice": {"enabled": True, FIELD: True, "tried": 3}}))

    def run(*arguments: Any) -> str:
        environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        environ.pop("SLUICE", None)
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=environ, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(run("-c", PROGRAM, ds_config).splitlines()[-1])
    assert (found["parsed"], found["default"], found["c"], found["context"]) == (True, False, 1, True)
    assert (found["layer"], found["kept"]) == (3, 3)
    assert f'"{FIELD}" must be true or false, not 3' in found["wrong"]
    assert f'"{FIELD}" (it is tried here) cannot come from the model\'s own config' in found["model"]
    assert any(f"| {FIELD} True |" in text for text in found["doctor"])
    written = {Path(line).name for line in run(WRITER, tmp_path / "docs").splitlines()}
    assert written == {"deepspeed.md", "security.md", "transformers.md"}
    pages = {name: (tmp_path / "docs" / name).read_text() for name in written}
    assert f"| `{FIELD}` | `true`, `false` | `false` | a row of a test |\n" in pages["deepspeed.md"]
    assert f"| `{FIELD}` | no | is tried here |\n" in pages["security.md"]
    assert f"| `{FIELD}` | not in a model's config |\n" in pages["transformers.md"]


def test_RestorePolicies_AreTheLibrarysOwn():
    library = load()
    assert (
        json.loads(library.text(library.lib.sluice_restore_policies_json)) == TABLE
        and len(restore.POLICIES) == len(TABLE["policies"]) >= 4
    )


def test_RestorePolicies_HaveTheNumbersOfTheHeader():
    lib = load().lib
    for name, policy in restore.POLICIES.items():
        assert getattr(lib, f"SLUICE_RESTORE_{name.upper()}") == policy.number
    assert (lib.SLUICE_RESTORE_ADAPTIVE, lib.SLUICE_RESTORE_BY_CHUNK) == (restore.ADAPTIVE, restore.BY_CHUNK)
    assert restore.name_of(restore.BY_CHUNK) == "by chunk" and restore.name_of(restore.ADAPTIVE) is None


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tuning.md").read_text()
MACHINE = next(block for block in re.findall(r"```json\n(.*?)```", PAGE, re.S) if "sluice_machine" in block)


def _read(machine: str) -> None:
    library = load()
    out = library.ffi.new("sluice_planner_t **")
    library.check(library.lib.sluice_planner_create(machine.encode(), len(machine.encode()), out))
    library.lib.sluice_planner_destroy(out[0])


def test_Example_AsPrinted_IsAMachine():
    _read(MACHINE)


def test_Table_HasEveryFieldThatTheLibraryKnows():
    with pytest.raises(InvalidArgument) as refused:
        _read(json.dumps({**json.loads(MACHINE), "no_such_field": 1}))
    known = set(re.findall(r"[a-z_]+", str(refused.value).split("known are ", 1)[1]))
    table = PAGE.split("| field | meaning |")[1].split("\n\n")[0]
    rows = {name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z_]+)", line.split("|")[1])}
    assert len(known) > 20 and rows == known - {"name"}
