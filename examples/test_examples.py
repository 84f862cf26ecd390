# SPDX-License-Identifier: Apache-2.0
"""The examples of the C ABI build as for a user, and learn the same numbers in every language."""

import glob
import os
import re
import shutil
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def run(command, expect=0, cwd=None, **environment):
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=cwd)
    assert done.returncode == expect, f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout if expect == 0 else done.stdout + done.stderr


def losses(text):
    return [float(found) for found in re.findall(r"^step +\d+ loss ([\d.]+)", text, re.MULTILINE)]


def need(program, package):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here (Debian: apt-get install {package})")


def bazel(*arguments):
    done = subprocess.run(["bazel", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"bazel {' '.join(arguments)}:\n{done.stderr[-3000:]}", pytrace=False)
    return done.stdout


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder with libsluice.so.0 and libsluice_mpi.so side by side, as an installation has them."""
    folder = tmp_path_factory.mktemp("lib")
    given = os.environ.get("SLUICE_EXAMPLES_LIB")  # an existing build
    if given is None:
        bazel("build", "--noshow_progress", "//capi:libsluice.so.0", "//backend/comm/mpi:libsluice_mpi.so")
        bin_folder = bazel("info", "bazel-bin").strip()
        sources = [os.path.join(bin_folder, "capi"), os.path.join(bin_folder, "backend", "comm", "mpi")]
    else:
        sources = [given, given]
    for source, name in zip(sources, ("libsluice.so.0", "libsluice_mpi.so"), strict=True):
        shutil.copy(os.path.join(source, name), folder)
    return str(folder)


def build(language, libraries, folder):
    """Into a folder that is named as seen from `folder`, as are the libraries; the new one."""
    script = os.path.join(HERE, language, "build.sh")
    run([script, os.path.join("made", language), os.path.relpath(libraries, folder)], cwd=folder)
    return os.path.join(folder, "made", language)


@pytest.fixture(scope="module")
def c_programs(libraries, tmp_path_factory):
    need("gcc", "gcc")
    return build("c", libraries, tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def c_local_losses(c_programs):
    return losses(run([os.path.join(c_programs, "local4"), "2"]))


def check_learning(found):
    assert len(found) >= 5
    assert all(after < before for before, after in zip(found, found[1:], strict=False))
    assert found[-1] < 0.8 * found[0]


def test_CLayer_LoadedByName_Learns(c_programs, libraries):
    check_learning(losses(run([os.path.join(c_programs, "layer")], LD_LIBRARY_PATH=libraries)))
    needed = run(["readelf", "-d", os.path.join(c_programs, "layer")])
    assert "libc.so.6" in needed and "sluice" not in needed


def test_CLayer_LibraryMissing_SaysSo(c_programs):
    text = run([os.path.join(c_programs, "layer"), "/nowhere/libsluice.so.0"], expect=2)
    assert "/nowhere/libsluice.so.0" in text


def test_CLocal_AnyNumberOfRanks_LearnsTheSame(c_programs):
    one = losses(run([os.path.join(c_programs, "local4"), "1"]))
    check_learning(one)
    for ranks in ("2", "4", "8"):
        assert losses(run([os.path.join(c_programs, "local4"), ranks])) == pytest.approx(one, abs=3e-6)


def test_CPipeline_AnyStagesAndReplicas_LearnsTheSame(c_programs):
    program = os.path.join(c_programs, "pipeline4")
    one = losses(run([program, "1", "1"]))
    check_learning(one)
    for stages, replicas in (("2", "1"), ("4", "1"), ("2", "2"), ("4", "2")):
        assert losses(run([program, stages, replicas])) == pytest.approx(one, abs=3e-6)


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
def test_CStashing_WithoutFlush_HasTheBitsOfTheDelayInSequence(c_programs, stages):
    """A stage keeps one version of its weights for each outstanding micro-batch."""
    text = run([os.path.join(c_programs, "stashing"), str(stages)])
    versions = [int(n) for n in re.findall(r"^stage \d: (\d+) versions of the weights at most$", text, re.MULTILINE)]
    assert versions == [stages - s for s in range(stages)]
    assert text.rstrip().endswith(": the same bits")


def test_CStages_LessBudget_TakesLongerAndSaysWhy(c_programs):
    """More is never slower, every layer has its reason, and what does not fit says what would."""
    with open(os.path.join(HERE, "c", "stages.c")) as file:
        assert len(file.read().splitlines()) <= 100
    program, steps = os.path.join(c_programs, "stages"), []
    for budget in ("2500", "1300", "1100"):
        text = run([program, budget])
        steps.append(float(re.search(r"^a step takes ([\d.]+) ms$", text, re.MULTILINE).group(1)))
        assert len(re.findall(r"^stage \d: \d+ layers, ", text, re.MULTILINE)) == 4
        assert len(re.findall(r"^  layer \d+: (?:keep|recompute|offload): ", text, re.MULTILINE)) == 12
        for used, budgeted in re.findall(r" (\d+) bytes of (\d+)", text):
            assert int(used) <= int(budgeted) == int(budget) << 20
    assert steps[0] < steps[1] < steps[2]
    needed = re.search(r"stage \d does not fit: it needs (\d+) MiB", run([program, "300"], expect=1)).group(1)
    run([program, str(int(needed) + 1)])


def test_CMoving_ExpertsThatMove_LearnTheSameToTheBit(c_programs):
    """A host of at most 150 lines plans, transfers and replaces."""
    with open(os.path.join(HERE, "c", "moving.c")) as file:
        assert len(file.read().splitlines()) <= 150
    program = os.path.join(c_programs, "moving")
    unmoved, moved = run([program, "0"]), run([program, "1"])
    found = re.search(r"^epoch 1: (\d) experts move, fullest rank (\d+) rows -> (\d+)$", moved, re.MULTILINE)
    assert int(found.group(1)) >= 2
    assert int(found.group(3)) < int(found.group(2))
    lines = [line for line in moved.splitlines() if line.startswith("step")]
    assert lines == unmoved.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[-1] < 0.9 * losses[0]


def run_mpi(program, ranks):
    need("mpicc", "libopenmpi-dev")
    need("mpirun", "openmpi-bin")
    command = ["mpirun", "-n", ranks, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
    # Small messages over shared memory make Open MPI spin; two cores are few.
    return run([*command, program], OMPI_MCA_mpi_yield_when_idle="1")


def test_CPipelineMpi_FourProcesses_LearnAsThreadsDo(c_programs):
    text = run_mpi(os.path.join(c_programs, "pipeline_mpi"), "4")
    threads = losses(run([os.path.join(c_programs, "pipeline4"), "2", "2"]))
    assert losses(text) == pytest.approx(threads, abs=3e-6)


def test_CMpi_TwoProcesses_LearnAsThreadsDo(c_programs, c_local_losses):
    assert losses(run_mpi(os.path.join(c_programs, "mpi"), "2")) == pytest.approx(c_local_losses, abs=3e-6)


SECRET = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def run_tcp(link, program, changes=({}, {})):
    """Both ranks of the example, each in a network namespace; the end of each, as (status, text)."""
    children = []
    for rank, change in enumerate(changes):
        use = {"rank": rank, "world": 2, "secret": SECRET, **change}
        command = [program, str(use["rank"]), str(use["world"]), "10.77.0.1:29500"]
        environment = {**os.environ, "SLUICE_SECRET": use["secret"]}
        command = [*link.enter_argv(rank), *command]
        children.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    ends = [child.communicate(timeout=200)[0] for child in children]
    return [(child.returncode, text) for child, text in zip(children, ends, strict=True)]


@pytest.fixture(scope="module")
def two_machines():
    sys.path.insert(0, ROOT)
    from integration_tests.net.namespaces import NamespaceError, Namespaces

    link = Namespaces(2, 1e9)
    try:
        link.__enter__()
    except NamespaceError as error:
        pytest.skip(f"no namespaces here: {error}")
    yield link
    link.close()


def test_CTcp_TwoNetworkNamespaces_LearnAsThreadsDo(two_machines, c_programs, c_local_losses):
    ends = run_tcp(two_machines, os.path.join(c_programs, "tcp"))
    assert [status for status, _ in ends] == [0, 0], ends
    parts = [losses(text) for _, text in ends]
    assert [sum(of_ranks) for of_ranks in zip(*parts, strict=True)] == pytest.approx(c_local_losses, abs=3e-6)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"world": 4}, ["MISMATCH: .*rank 1 at 10.77.0.2 .* world_size 4"] * 2),
        (
            {"secret": SECRET[:-1] + "1"},
            ["TIMED_OUT: .* at .*10.77.0.2 .* claims to be rank 1 has another secret", "MISMATCH: .*same secret"],
        ),
    ],
)
def test_CTcp_WhatDoesNotFit_IsRefusedByNameOnBothMachines(two_machines, c_programs, change, texts):
    ends = run_tcp(two_machines, os.path.join(c_programs, "tcp"), ({}, change))
    for (status, text), expected in zip(ends, texts, strict=True):
        assert status == 2 and re.search(expected, text), ends
        assert SECRET not in text


def test_ProgramOfTheHeader_AsPrinted_HasAtMost40LinesAndRuns(libraries, tmp_path):
    need("gcc", "gcc")
    with open(os.path.join(ROOT, "capi", "include", "sluice", "sluice.h")) as file:
        comment = file.read().split("*/", 1)[0]
    program = re.findall(r"^ \*   (#include(?:.*\n)+? \*   \})\n \*\n", comment, re.MULTILINE)
    lines = [line.removeprefix(" *   ") for line in program[0].splitlines()]
    assert len(lines) <= 40
    (tmp_path / "layer.c").write_text("\n".join(lines) + "\n")
    command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/capi/include", str(tmp_path / "layer.c")]
    run([*command, f"{libraries}/libsluice.so.0", f"-Wl,-rpath,{libraries}", "-o", str(tmp_path / "layer")])
    wanted = ["y 1 0  dx 1 0", "y 1 2  dx 2 3", "y 0.5 0.5  dx 0.5 0.5"]
    assert run([str(tmp_path / "layer")]).splitlines() == wanted


@pytest.fixture(scope="module")
def rust_programs(libraries, tmp_path_factory):
    need("rustc", "rustc")
    return build("rust", libraries, tmp_path_factory.mktemp("rust"))


def test_RustLocal_TwoRanks_LearnWhatCDoes(rust_programs, c_local_losses):
    assert losses(run([os.path.join(rust_programs, "local_rust")])) == pytest.approx(c_local_losses, abs=3e-6)


def test_RustPipeline_ThreeStages_LearnAsOneLoopDoes(rust_programs):
    check_learning(losses(run([os.path.join(rust_programs, "pipeline_rust")])))  # it compares itself, to the bit


def test_FortranMpi_TwoProcesses_LearnWhatCDoes(libraries, c_local_losses, tmp_path):
    need("mpif90", "libopenmpi-dev gfortran")
    program = os.path.join(build("fortran", libraries, tmp_path), "mpi_fortran")
    assert losses(run_mpi(program, "2")) == pytest.approx(c_local_losses, abs=3e-6)


@pytest.mark.parametrize(("language", "compiler", "package"), [("cpp", "g++", "g++"), ("go", "go", "golang-go")])
def test_CxxAndGoLocal_TwoRanks_LearnWhatCDoes(libraries, c_local_losses, tmp_path, language, compiler, package):
    need(compiler, package)
    program = os.path.join(build(language, libraries, tmp_path), f"local_{language}")
    assert losses(run([program])) == pytest.approx(c_local_losses, abs=3e-6)
    assert run([program, "-1"], expect=1).startswith("INVALID_ARGUMENT: ")


@pytest.mark.timeout(600)
def test_TransformersTrainer_OneConfigValue_LearnsAsStockDoes(tmp_path):
    """Every loss of a short training: rounding has no time to grow."""
    pytest.importorskip("transformers", reason="./test installs it")
    script = os.path.join(HERE, "transformers_lm", "train.py")
    command = [sys.executable, script, "--steps", "30", "--experts"]
    texts = [run([*command, name], TMPDIR=str(tmp_path)) for name in ("sluice", "grouped_mm")]
    assert not list(tmp_path.glob("tmp*"))
    assert "MixtralExperts runs on Sluice, fused in C" in texts[0] and "on Sluice" not in texts[1]
    found, wanted = (losses(text) for text in texts)
    assert len(found) == 3 and found[-1] < 0.9 * found[0]
    assert found == pytest.approx(wanted, rel=2e-3)


def finetune(folder, *options, ranks=1, **environment):
    """Returns what the example prints, and its losses."""
    pytest.importorskip("peft", reason="./test installs it")
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    script = os.path.join(HERE, "finetune", "finetune.py")
    short = ["--steps", "5", "--length", "32", "--dtype", "float32"]
    text = run([sys.executable, *launcher, script, *short, "--out", str(folder), *options], **environment)
    before, after = re.search(r"unseen text: ([\d.]+) before, ([\d.]+) after", text).groups()
    assert float(after) < float(before) - 0.2 and (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert ("tensors merged into" in text) == (ranks == 1) == (folder / "merged" / "config.json").is_file()
    assert ("ep_size 2" in text) == (ranks == 2)
    return text, [float(one) for one in re.findall(r"^step .* loss ([\d.]+)", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    return finetune(tmp_path_factory.mktemp("finetuned"))


@pytest.mark.timeout(900)
def test_Finetune_LoraOnExperts_LearnsAsStockDoes_AndMerges(finetuned, tmp_path):
    (text, found), (stock, wanted) = finetuned, finetune(tmp_path / "stock", "--experts", "grouped_mm")
    assert "Qwen3MoeExperts runs on Sluice, fused in C" in text and "on Sluice" not in stock
    assert len(found) == 5 and found == pytest.approx(wanted, rel=2e-3)
    finetune(tmp_path / "two", "--expert-format", "int8", ranks=2)


@pytest.mark.timeout(900)
def test_Finetune_SftTrainerOfTrl_LearnsAsTrainerDoesOnOneAndTwoRanks(finetuned, tmp_path):
    folders = glob.glob(os.path.join(sys.prefix, "trl-*[0-9]"))
    if not folders and sys.version_info < (3, 11):
        pytest.skip("TRL needs Python 3.11")
    sft = ["--trainer", "sft"]
    script = os.path.join(HERE, "finetune", "finetune.py")
    without = f"import runpy, sys; sys.modules['trl'] = None; runpy.run_path({script!r}, run_name='__main__')"
    text = run([sys.executable, "-c", without, *sft], expect=1, cwd=tmp_path)
    assert "python -m pip install trl" in text and not os.listdir(tmp_path)
    _, wanted = finetuned
    for ranks in (1, 2):
        share = ["--batch", str(4 // ranks)]
        text, found = finetune(tmp_path / str(ranks), *sft, *share, ranks=ranks, PYTHONPATH=folders[0])
        assert "Qwen3MoeExperts runs on Sluice, fused in C" in text
        assert len(found) == 5 and found == pytest.approx(wanted, abs=1e-3)  # the balance loss of routers is 4e-3


def test_FirstExampleOfTheReadme_RunsOnSluice():
    pytest.importorskip("transformers")
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        example = re.search(r"```python\n(.*?)```", file.read(), re.DOTALL)[1]
    assert len(example.splitlines()) <= 10
    assert run([sys.executable, "-c", example]).rstrip().endswith(" sluice")
