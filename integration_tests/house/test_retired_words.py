"""Names, files, keys, options and documents say the words that the project decided on (retired_words.py)."""

import os
import re
import subprocess

import pytest
import retired_words


def complaints(path, text):
    rows = [*retired_words.in_path(path), *retired_words.found(text)]
    return [f"{path}:{line}: `{name}` is retired: say {instead}" for line, name, instead in rows]


def test_Tree_EveryFile_HasNoRetiredWord(root):
    done = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True)
    bad, looked_at = [], 0
    for path in done.stdout.splitlines():
        whole = os.path.join(root, path)
        if not retired_words.is_looked_at(path) or os.path.islink(whole) or not os.path.exists(whole):
            continue
        with open(whole, encoding="utf-8") as file:
            bad += complaints(path, file.read())
        looked_at += 1
    assert looked_at > 900
    assert not bad, f"{len(bad)} retired words:\n" + "\n".join(bad[:60])


@pytest.mark.parametrize("row", retired_words.WORDS, ids=lambda row: row.word)
def test_Words_PlantedName_IsRefusedWithWhatToSay(row):
    for text in (row.example, f"int {row.example};", f'{{"{row.example}": 1}}', f"see `{row.example}`"):
        assert any(row.instead in line for line in complaints("backend/a.c", text)), text


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("static int num_parcels;", "token copy"),
        ("SLUICE_PARCELS_MOST", "token copy"),
        ("Parcels_AnyRoutes_AreNumbered(void)", "token copy"),
        ("Deduplicate_BytesSent_AreThoseOfParcels", "token copy"),
        ("CudaCeilingBudget_FromTheSmallestUp_", "capacity"),
        ("    .far = &table,", "device"),
        ("if (device->far != NULL)", "device"),
        ('add("--patience", type=float)', "timeout"),
        ('{"restore_middle_of": [0]}', "pre_activation"),
        ("| `policy.middle` | yes |", "pre_activation"),
        ("Ceilings are rows.", "capacity"),
    ],
)
def test_Words_InAnyCaseForm_AreRefused(text, instead):
    assert any(instead in line for line in complaints("docs/style.md", text)), text


@pytest.mark.parametrize(
    "path", ["backend/moe/routing/parcels_far.c", "capi/test/cuda_ceiling_test.c", "docs/taper.txt", "a/tally.py"]
)
def test_Words_InAFilesName_AreRefused(path):
    assert complaints(path, "")


@pytest.mark.parametrize(
    "text",
    [
        "as far as there is room, so far; int64_t so_far[2];",
        "far below the deadline; sluice_unless_far_longer(ns, usual_ns)",
        "the product of the sizes; for a, b in itertools.product(x, y):",
        "F.scaled_dot_product_attention(q, k, v)",
        "kept rows; sluice_kept_decisions; kept_chunks",
        "killed in the middle of a step; int middle = (low + high) / 2;",
        "math.ceil(rows); ceil(x); a late rank; taken from it; the rows are cut; ranks agree",
        "rows that were released; bytes on the wire; a place of its own",
    ],
)
def test_Words_OfPlainEnglish_ArePassed(text):
    assert not complaints("backend/a.c", text)


def test_Exempt_EveryEntry_StillCoversAFile(root):
    done = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True)
    for pattern in retired_words.EXEMPT:
        assert any(re.match(pattern, path) for path in done.stdout.splitlines()), pattern
