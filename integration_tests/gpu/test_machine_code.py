# SPDX-License-Identifier: Apache-2.0
"""Tests that the kernels' machine code keeps its budgets (machine_code.txt), and that a planted spill or narrow load
does not."""

import re

import pytest
from machine_code import BUDGETS, KERNELS, beyond, functions_of, kernels_of, line_of, loops_of, measure, read_budgets

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


LOOPS = """
	.section	.text.sluice_made,"ax",@progbits
sluice_made:
        /*0000*/                   BSSY B0, `(.L_x_4) ;
.L_x_1:
        /*0010*/                   LDG.E.U16 R2, desc[UR4][R4.64] ;
        /*0020*/                   BRX R22 -0x30 (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_2:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R8.64] ;
        /*0040*/                   CALL.REL.NOINC `($__internal_0_$div) ;
        /*0050*/                   STG.E desc[UR4][R8.64], R4 ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/              @!P1 BRA `(.L_x_1) ;
        /*0080*/                   BSYNC B0 ;
.L_x_5:
        /*0090*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*00a0*/                   EXIT ;
"""


def test_Measure_OfLoopsInLoops_IsOfTheInnermostOne():
    """.L_x_1 contains .L_x_2, which the switch skips; .L_x_5 is never reached."""
    code = functions_of(LOOPS)["made"]
    assert sorted(map(sorted, loops_of(code))) == [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6]]
    assert measure(code) == (4, 1, {128: 1}, {32: 1})
