"""The tuner's benchmarks run and write whole records: tiny layers, whose numbers mean nothing here."""

import json
import statistics
import subprocess
import sys

import pytest

from integration_tests.benchmarks.tuner import reference, tuner


@pytest.mark.timeout(900)
def test_TunerBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.tuner", "--smoke", "--records", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "tuner.raw.json").read_text())
    line, planned = record["lines"]
    assert set(line["regret"]) == {"adaptive", "profile", "model", "schedule", "mpmoe", "mpipemoe"}
    # Under a budget a model's plan may not fit beside what the adapter allocates.
    assert {"adaptive", "profile", "model"} <= set(planned["regret"]) <= set(line["regret"])
    assert set(line["over_adaptive"]) == {"by destination", "pipemoe", "unsplit", "fixed n"}
    assert not planned["over_adaptive"] and all(ratio > 0 for ratio in line["over_adaptive"].values())
    for each in (line, planned):
        for mode, found in each["modes"].items():
            assert found["key"] in each["measured"]
            assert found["decisions"][0]["why"] == ("predicted" if mode == "model" else "raced")
            assert found["stats"]["timed_passes"] > 40 and found["steps"] >= 80  # of --smoke
            assert (found["decisions"][0]["restore_input"] is None) == (each is line)
        assert each["calibration"]["provenance"] == "calibrated"
        for key, measured in each["lanes"].items():
            assert measured["compute"] > 0 and measured["comm"] > 0
            if key in each["error"]:
                assert each["predicted"][key]["compute"] > 0 and each["predicted"][key]["comm"] > 0
        then, now = each["reference_then"], each["reference_now"]
        for key, error in each["error"].items():  # of the step's time on the wall, as the mark is
            median, said = statistics.median(each["measured"][key]), each["predicted"][key]["schedule"]
            assert error == pytest.approx((said + then["host_s"]) / median - 1)
            assert each["error_without_host"][key] == pytest.approx(said / median - 1)
            drifted = (each["predicted_now"][key] + now["host_s"]) / median - 1
            assert each["error_without_drift"][key] == pytest.approx(drifted)
        for name in tuner.ERRORS.keys() - {"error_while_steady"}:
            assert set(each[name]) == set(each["error"])
        assert each["is_steady"] == (each["apart"] <= 0.05) and each["repeated"] >= 0
        assert each["error_while_steady"] == (each["error"] if each["is_steady"] else {})
        for when in ("reference_then", "reference_now"):
            assert all(seconds > 0 for seconds in each[when].values())
        assert set(each["error"]) <= set(each["predicted_now"])
    assert record["summary"]["error"]["count"] >= len(line["measured"])
    assert (tmp_path / "tuner.svg").read_text().count("h0") == record["summary"]["error"]["count"]
    assert record["summary"]["scenarios"] == 2 and record["summary"]["under_budget"]["scenarios"] == 1
    for words in (
        "pipemoe ",
        "by destination",
        "predicted overlap",
        "hypotheses:",
        "one valley",
        *tuner.ERRORS.values(),
    ):
        assert words in done.stdout, words


def test_TunerBenchmark_Marks_AreNamedWhereTheyAreMissed():
    regret = {"adaptive": {"median": 0.01, "worst": 0.3}}
    assert tuner.missed({"regret": regret, "error_while_steady": {"median": 0.05, "p90": 0.2}}) == [
        "regret adaptive worst 30.0 %, must be at most 10 %",
        "error_while_steady p90 20.0 %, must be at most 12 %",
    ]
    assert tuner.missed({"regret": regret, "error_while_steady": None})[1:] == [
        "error_while_steady median: in no scenario",
        "error_while_steady p90: in no scenario",
    ]


def _line(is_steady: bool, seconds: float) -> dict:
    """A scenario without a budget in which one chunk is said to take 1 ms."""
    lanes = {n: {"compute": 1e-3, "comm": 1e-4, "passes": seconds, "overlap": 0.0} for n in ("1", "4")}
    predicted = {n: {"schedule": 1e-3, "compute": 1e-3, "comm": 1e-4, "overlap": 0.0} for n in ("1", "4")}
    same = {"gemm_s": 1.0, "exchange_s": 1.0, "host_s": 0.0}
    return tuner.judge(
        {
            "budget_share": None,
            "measured": {"1": [seconds] * 3, "4": [seconds] * 3},
            "modes": {"adaptive": {"key": "1", "stats": {}}},
            "models": {},
            "lanes": lanes,
            "predicted": predicted,
            "predicted_now": {"1": 1e-3, "4": 1e-3},
            "reference_then": same,
            "reference_now": same,
            "baselines": {},
            "is_steady": is_steady,
        }
    )


def test_TunerBenchmark_MachineThatDidNotStay_ItsErrorsStandApart():
    lines = [_line(True, 1e-3), _line(False, 2e-3)]
    assert lines[0]["error_while_steady"] == lines[0]["error"] == {"1": 0, "4": 0}
    assert lines[1]["error_while_steady"] == {} and lines[1]["error"] == {"1": -0.5, "4": -0.5}


MACHINE = {
    "sluice_machine": 2,
    "name": "m",
    "world_size": 2,
    "gemm_model_width": 256,
    "gemm": {"f32": {"forward": [[1, 2e-10], [64, 1e-11]]}, "bf16": {"flops_per_second": 1e12, "half_rows": 8}},
    "rows": {"points": [[1024, 1e-6]]},
    "activation_seconds": 1e-9,
    "exchange": {"startup_seconds": 1e-5, "per_peer_seconds": 0, "points": [[1024, 2e-5]]},
    "exchange_contention": {"points": [[1024, 3e-5]]},
    "second_exchange_seconds": 1e-6,
    "second_exchange_contention": 2e-6,
    "exchange_skew_gain": 0.5,
    "pass_seconds": 1e-4,
    "share": [{"lane": "comm", "beside": ["compute"], "share": 0.8}],
    "error": {"median": 0.04, "p90": 0.1, "count": 20},
}


def test_Reference_DriftedMachine_TakesLongerByLaneAndIsTheSameElse():
    found = reference.drifted(MACHINE, {"gemm": 2.0, "exchange": 10.0})
    assert found["gemm"]["f32"]["forward"] == [[1, 4e-10], [64, 2e-11]]
    assert found["gemm"]["bf16"] == {"flops_per_second": 5e11, "half_rows": 8}
    assert found["rows"]["points"] == [[1024, 2e-6]]
    assert (found["activation_seconds"], found["pass_seconds"]) == (2e-9, 2e-4)
    assert found["exchange"] == {"startup_seconds": 1e-4, "per_peer_seconds": 0, "points": [[1024, 2e-4]]}
    assert found["exchange_contention"]["points"][0][1] == pytest.approx(3e-4)
    assert found["second_exchange_seconds"] == pytest.approx(1e-5)
    assert found["second_exchange_contention"] == pytest.approx(2e-5)
    same = ("sluice_machine", "name", "world_size", "gemm_model_width", "exchange_skew_gain", "share", "error")
    assert all(found[name] == MACHINE[name] for name in same) and set(found) == set(MACHINE)
    assert reference.drifted(MACHINE, {"gemm": 1.0, "exchange": 1.0}) == MACHINE


def test_Reference_Drift_IsNowOverThenByMedians():
    then = reference.medians([(1.0, 4.0, 0.1), (2.0, 5.0, 0.2), (9.0, 6.0, 0.9)])
    assert then == {"gemm_s": 2.0, "exchange_s": 5.0, "host_s": 0.2}
    now = reference.medians([(3.0, 10.0, 0.1)])
    assert reference.drift(then, now) == {"gemm": 1.5, "exchange": 2.0}


@pytest.mark.parametrize("key", [("square", 2), ("many", 4), ("long", 2), ("wide", 1)])
def test_TunerBenchmark_Skew_IsThatOfTheScenario(monkeypatch, key):
    """Of K routes of a hot token all stay with rank 0: it receives 1.6 times its part."""
    pytest.importorskip("torch")
    from integration_tests.benchmarks.tuner import tuner_scenario

    T, M, H, E, K = tuner.SHAPES[key[0]]
    assert key[1] == K
    received = 0
    for rank in (0, 1):
        monkeypatch.setattr(tuner_scenario.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(tuner_scenario.dist, "get_world_size", lambda: 2)
        case = dict(zip("TMHEK", (20000, 1, 1, E, K), strict=True), skew=1.6)
        ids = tuner_scenario.Scenario({"seed": 7}, case).ids
        assert all(len(set(row)) == K for row in ids[:200].tolist())
        received += int((ids < E // 2).sum())
    assert received / (20000 * K) == pytest.approx(1.6, abs=0.02)


@pytest.mark.timeout(900)
def test_OverlapBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.overlap", "--smoke", "--rounds", "3"]
    done = subprocess.run([*command, "--records", str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "overlap.raw.json").read_text())["cases"]["smoke"]
    ideal = sum(max(p["comm_s"], p["compute_s"] + p["comm_cpu_s"]) for p in found["parts"].values())
    assert found["ideal_s"] == pytest.approx(ideal) and ideal > 0
    assert all(p["comm_s"] > 0 and p["comm_cpu_s"] > 0 and p["compute_s"] >= 0 for p in found["parts"].values())
    assert len(found["chosen_s"]) == len(found["one_chunk_s"]) == 3
    assert 0 < found["settled_after"] <= 120 and found["n"] == found["decisions"][-1]["num_chunks"]


def test_Choice_OfPartOfItsChunks_IsToldChunkByChunk() -> None:
    from integration_tests.benchmarks.tuner.tuner_scenario import Choice, key_of

    part, whole = Choice(4, "offload", "keep", "deferred", 3), Choice(4, "offload", "keep", "deferred")
    assert part.by_chunk(part.restore_input, "redispatch") == ["offload"] * 3 + ["redispatch"]
    assert part.by_chunk(part.restore_pre_activation, "recompute") == ["keep"] * 3 + ["recompute"]
    assert whole.by_chunk(whole.restore_input, "redispatch") == "offload"
    assert Choice(4).by_chunk(None, "redispatch") == "adaptive"
    assert key_of(part) == "4/offload/keep/deferred/first 3"
    assert (key_of(whole), key_of(Choice(4))) == ("4/offload/keep/deferred", "4")
