# SPDX-License-Identifier: Apache-2.0
"""Tests that the kernels' machine code keeps its budgets (machine_code.txt), and that a planted spill or narrow load
does not."""

import re

import pytest
from machine_code import BUDGETS, KERNELS, beyond, kernels_of, line_of, read_budgets

BAD = "beyond the budget of {}, or without one; see why, or change the line by hand:\n{}"


def hold(found, arch):
    """Returns the violations of the budgets, one line each."""
    budgets = read_budgets(BUDGETS.read_text(), arch)
    why = {name: beyond(found[name], budgets[name]) if name in budgets else ["no line"] for name in found}
    return [f"{line_of(arch, name, found[name])}: {'; '.join(why[name])}" for name in found if why[name]]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(KERNELS.parents[3])


@pytest.mark.parametrize(
    "arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.full), pytest.param("sm_100", marks=pytest.mark.full)]
)
def test_Kernels_MachineCode_IsWithinItsBudget(arch):
    found = kernels_of("backend/device/cuda/kernels/sluice_kernels.cu", arch)
    bad = hold(found, arch)
    assert not bad, BAD.format(arch, "\n".join(bad))
    assert found.keys() == read_budgets(BUDGETS.read_text(), arch).keys()


def test_Activations_OnWideRows_MoveBy16BytesAndAreShort():
    """The hot loop computes eight columns. Derivatives of both GELUs in f32 spill 8 bytes per row, outside the loop."""
    budgets = read_budgets(BUDGETS.read_text(), "sm_90")
    kernels = {
        name: kernel for name, kernel in budgets.items() if name.startswith("activation_") and "_any_" not in name
    }
    assert len(kernels) == 7 * 3 * 2
    for name, kernel in kernels.items():
        assert kernel.loads.keys() == kernel.stores.keys() == {128}, name
        assert kernel.instructions <= 40 * 8 and kernel.calls == 0, name
        assert kernel.spilled == 0 or re.fullmatch("activation_backward_gelu(_tanh)?_f32", name), name


def planted(tmp_path, file, *changes):
    """Compiles a modified file of kernels, and returns the violations of the budget."""
    text = (KERNELS / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / file).write_text(text)
    return hold(kernels_of(str(tmp_path / file), "sm_90"), "sm_90")


def test_Kernels_WithASpill_AreBeyondTheBudget(tmp_path):
    """A bound of eight blocks per SM leaves 32 registers."""
    kernels = "SLUICE_KERNELS_BY_DTYPE(sum_columns, sluice_column_sum_args_t)"
    bad = planted(tmp_path, "sums.cu", (kernels, f"#define SLUICE_CUDA_BLOCK 256, 8\n{kernels}"))
    assert any(line.split()[0] == "sum_columns_f16" and "spilled" in line for line in bad), bad


def test_Kernels_WithANarrowLoad_AreBeyondTheBudget(tmp_path):
    wide = "const pack_t<E, N> p = load_pack<E, N>(a.rows, row * a.width + j);"
    narrow = (
        "pack_t<E, N> p;\n        for (int v = 0; v < N; ++v) "
        "p.x[v] = ((const volatile typename E::stored*)a.rows)[row * a.width + j + v];"
    )
    bad = planted(tmp_path, "rows.cu", (wide, narrow))
    assert {line.split()[0] for line in bad} >= {f"combine_rows_{dtype}" for dtype in ("f32", "bf16", "f16", "f64")}
    assert all("loads of at most" in line for line in bad)
