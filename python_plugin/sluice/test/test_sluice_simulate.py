# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice simulate`: scaling in limits with a known result, skew, replayed routing, speed, errors."""

import functools
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from sluice.planning import machines, routing, simulate, stock
from sluice.planning.errors import BadInput
from sluice.planning.planner import Choice, Planner, Workload
from sluice.planning.rates import Rates

FLAGS = "--model-width 1024 --hidden-width 4096 --top-k 2 --tokens 4096 --dtype f16".split()
FREE = {"bytes_per_second": 1e18, "startup_seconds": 0}


@pytest.fixture
def run(command):
    return functools.partial(command, "simulate")


def _simulator(layers: int = 3, **changes) -> simulate.Simulator:
    machine = machines.load("a100-8x8-200g")
    return simulate.Simulator(Planner(machines.Machine({**machine.data, **changes}, {})), layers, Choice())


def test_Weak_LinksThatCostNothing_ScalePerfectly() -> None:
    simulator = _simulator(exchange=FREE, node_exchange=FREE)
    work = Workload(1024, 4096, 4096, 8, 2, 8, "f16")
    points = simulate.weak(simulator, work, 1, [8, 64, 1024, 16384], lambda *where: 1.0)
    assert [p.experts for p in points] == [8, 64, 1024, 16384]
    assert all(share == pytest.approx(1.0, abs=0.02) for share in simulate.efficiency(points))


def test_Weak_SlowLinksBetweenNodes_CostWhenTheFirstNodeIsFull() -> None:
    simulator = _simulator()
    work = Workload(1024, 4096, 4096, 8, 2, 8, "f16")
    points = simulate.weak(simulator, work, 1, [4, 8, 16, 64], lambda *where: 1.0)
    shares = simulate.efficiency(points)
    assert shares[1] > 0.9 > 0.6 > shares[2] > shares[3]
    for p in points:
        assert p.seconds <= p.unsplit_seconds * (1 + 1e-9)
        # No step is shorter than its longest lane.
        assert p.seconds >= max(p.compute_busy, p.comm_busy)


def test_Weak_LayersAddUp_AndSkewCosts() -> None:
    work = Workload(1024, 4096, 4096, 16, 2, 16, "f16")
    one, four = _simulator(1), _simulator(4)
    single = simulate.weak(one, work, 1, [16], lambda *where: 1.0)[0]
    assert simulate.weak(four, work, 1, [16], lambda *where: 1.0)[0].seconds == pytest.approx(4 * single.seconds)
    skewed = simulate.weak(one, work, 1, [16], lambda *where: 2.0)[0]
    assert skewed.balanced_seconds < skewed.seconds
    assert skewed.skew_max == 2.0


DEEPSEEK = "--model-width 7168 --hidden-width 2048 --top-k 8 --tokens 4096 --gated --experts-per-rank 4".split()


def test_Levels_LeftOpen_AreTheFasterOfBoth(run) -> None:
    """DeepSeek-V3's layer, 256 experts on 64 ranks: a token's experts share nodes, and these a slow link."""
    found = {}
    for way in ("rank", "node", "rank_or_node"):
        status, out, _ = run("--machine", "h200-8x8", "--ranks", "8,64", *DEEPSEEK, "--deduplicate", way, "--json")
        assert status == 0
        found[way] = json.loads(out)["scaling"]["weak"]
    for by_rank, by_node, chosen in zip(*found.values()):
        assert chosen["seconds"] == min(by_rank["seconds"], by_node["seconds"])
    assert [point["deduplicate"] for point in found["rank_or_node"]] == [True, "node"]
    assert found["node"][1]["efficiency"] > 1.15 * found["rank"][1]["efficiency"]
    for way in ("rank", "node"):
        point = found[way][1]
        row = f"| by {way} | {1e3 * point['seconds']:.1f} ms | {100 * point['efficiency']:.1f} % |"
        assert row in (Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "layer.md").read_text()
    text = run("--machine", "h200-8x8", "--ranks", "8,64", *DEEPSEEK, "--deduplicate", "rank_or_node")[1]
    assert re.search(r"\n +8 .* by rank\n(?: +stock .*\n)+ +64 .* by node\n", text)


def test_Levels_OneRoute_KeepsOne_ABudgetChoosesTheFaster() -> None:
    simulator = _simulator()
    work = Workload(1024, 4096, 4096, 64, 8, 64, "f16", deduplicate="rank_or_node")
    assert simulator.way(work.with_(top_k=1)).deduplicate is True
    for changes in ({}, {"memory_budget": 1 << 34}):
        assert simulator.way(work.with_(**changes)).deduplicate == "node"
    assert simulator.way(work.with_(memory_budget=1)).deduplicate is True  # neither fits


def _on_cpus(link: float) -> simulate.Simulator:
    machine = machines.load("cpu-1x-10g")
    exchange = {"bytes_per_second": link, "startup_seconds": 1e-5}
    return simulate.Simulator(Planner(machines.Machine({**machine.data, "exchange": exchange}, {})), 1, Choice())


def test_Adaptive_OnCpus_SendsWhatIsFaster_ElseRows(run) -> None:
    """As in a run with the machine, token copies are sent over a slow link; on a fast link their sums cost more. A
    layer that cannot choose sends rows."""
    work = Workload(256, 256, 4096, 16, 4, 4, "f32", deduplicate="adaptive")
    assert _on_cpus(1e12).way(work).deduplicate is False
    slow = _on_cpus(1e8)
    assert slow.way(work).deduplicate is True
    for changes in ({"top_k": 1}, {"world_size": 1}, {"memory_budget": 1 << 34}, {"host_memory_budget": 1 << 34}):
        assert slow.way(work.with_(**changes)).deduplicate is False
    flags = "--model-width 256 --hidden-width 256 --top-k 4 --tokens 4096 --experts-per-rank 4 --dtype f32".split()
    points = {}
    for device in ("cpu-1x-10g", "h200-8x8"):
        words = ("--machine", device, "--ranks", "4", *flags, "--json")
        assert run(*words)[1] == run(*words, "--deduplicate", "adaptive")[1]
        points[device] = json.loads(run(*words)[1])["scaling"]["weak"][0]["deduplicate"]
    assert points["h200-8x8"] is False  # as on any GPU


def test_Strong_TotalsStay() -> None:
    work = Workload(1024, 4096, 4096, 64, 2, 8, "f16")
    points = simulate.strong(_simulator(1), work, 64, [8, 32], lambda *where: 1.0)
    assert [(p.tokens, p.experts) for p in points] == [(4096, 64), (1024, 64)]
    with pytest.raises(BadInput, match="64 experts do not divide over 48 ranks"):
        simulate.strong(_simulator(1), work, 64, [8, 48], lambda *where: 1.0)


def test_Zipf_SharesSumToOne_AndNoExpertGetsATokenTwice() -> None:
    for exponent in (0.0, 0.5, 1.0, 3.0):
        for top_k in (1, 2, 8):
            shares = routing.zipf_shares(64, exponent, top_k)
            assert sum(shares) == pytest.approx(1.0) and max(shares) <= 1 / top_k * (1 + 1e-9)
    assert routing.zipf_skew(64, 16, 0.0, 2, 0) == pytest.approx(1.0)
    assert routing.zipf_skew(64, 16, 1.0, 2, 0) > 1.5
    assert routing.zipf_skew(64, 16, 1.0, 2, 7) == routing.zipf_skew(64, 16, 1.0, 2, 7)
    with pytest.raises(BadInput, match="--zipf is 9"):
        routing.zipf_shares(8, 9, 1)


def _trace(tmp_path, loads: list, layers: int = 1, experts: int = 4):
    path = tmp_path / "routing.jsonl"
    head = {"sluice_routing": 1, "layers": layers, "experts": experts}
    path.write_text(
        "\n".join(json.dumps(row) for row in [head, *({"step": s, "loads": x} for s, x in enumerate(loads))])
    )
    return str(path)


def test_Routing_Replayed_IsTheMedianSkewOfEachLayer(tmp_path) -> None:
    path = _trace(
        tmp_path, [[[4, 0, 2, 2], [1, 1, 1, 1]], [[8, 0, 0, 0], [1, 1, 1, 1]], [[5, 1, 1, 1], [1, 1, 1, 1]]], 2
    )
    trace = routing.read(path)
    assert trace.skew(0, 4, 4) == pytest.approx(2.5)  # 2, 4 and 2.5
    assert trace.skew(0, 2, 4) == pytest.approx(1.5)  # 1, 2 and 1.5
    assert trace.skew(1, 4, 4) == 1.0 and trace.skew(3, 4, 4) == 1.0


@pytest.mark.parametrize(
    ("loads", "text"),
    [
        ([[[1, 2, 3]]], r"line 2: loads\[0\] has 3 experts, the head says 4"),
        ([[[1, 2, 3, 4]] * 2], "line 2: loads has 2 layers, the head says 1"),
        ([[[1, 2, 3, -4]]], r"loads\[0\]\[3\] is -4"),
        ([], "it holds no steps"),
    ],
)
def test_Routing_OfAnotherShape_IsNamed(tmp_path, loads: list, text: str) -> None:
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    with pytest.raises(BadInput, match="routing .*binary: .*can't decode"):
        routing.read(str(tmp_path / "binary"))
    with pytest.raises(BadInput, match=text):
        routing.read(_trace(tmp_path, loads))


MIXTRAL = "--layers 32 --model-width 4096 --hidden-width 14336 --experts 8 --top-k 2 --tokens 8192 --gated".split()


def test_Simulate_MoreThanTheDeviceHas_DoesNotFit(run) -> None:
    """32 layers of Mixtral keep 33.7 GiB for 8,192 tokens; their experts take 21 GiB with gradients on 8 ranks."""
    status, out, _ = run("--machine", "h200-8x8", "--ranks", "8", *MIXTRAL)
    assert status == 0 and " 33.7 GiB" in out and " 21 GiB" in out and "does not fit" not in out
    assert "On 8 ranks a step of these layers takes 901.09 ms at 100.0 % efficiency; computation limits it" in out
    status, out, _ = run("--machine", "a100-8x8-200g", "--ranks", "8", *MIXTRAL)
    assert (
        status == 1 and "does not fit on 8 ranks: 33.7 GiB of rows and 21 GiB of experts on a device of 40 GiB" in out
    )
    budget = re.search(r"try --budget (\w+)", out).group(1)
    status, out, _ = run("--machine", "a100-8x8-200g", "--ranks", "8", *MIXTRAL, "--budget", budget)
    assert status == 0 and "does not fit" not in out
    status, out, _ = run("--machine", "a100-8x8-200g", "--ranks", "8", *MIXTRAL, "--budget", budget, "--json")
    (point,) = json.loads(out)["scaling"]["weak"]
    assert 0 < point["usual_bytes"] <= point["total_bytes"] and point["usual_bytes"] + point["expert_bytes"] <= 40 << 30


def test_Simulate_TheMostRanks_AreSimulatedAndOneMoreIsNot(run) -> None:
    began = time.process_time()
    words = ["--machine", "h200-8x8", "--layers", "32", "--zipf", "0.3", *FLAGS, "--json"]
    status, out, err = run(*words, "--ranks", "1024,16384")
    assert status == 0, err
    few, many = json.loads(out)["scaling"]["weak"]
    assert (many["ranks"], many["experts"]) == (16384, 16384) and many["choice"]["num_chunks"] >= 1
    assert many["seconds"] > few["seconds"] and many["tokens_per_second"] > few["tokens_per_second"]
    assert time.process_time() - began < 10
    assert run(*words, "--ranks", "16385")[0] == 2


def test_Simulate_Both_WritesTableJsonAndPlot(tmp_path, run) -> None:
    picture = tmp_path / "scaling.svg"
    words = ["--machine", "a100-8x8-1600g", "--ranks", "8,16,64", "--scaling", "both", "--experts", "64", *FLAGS]
    status, out, _ = run(*words, "--picture", str(picture))
    assert status == 0 and "weak scaling" in out and "strong scaling" in out and "error not measured" in out
    assert len(ElementTree.fromstring(picture.read_text()).findall(".//{*}circle")) == 6
    status, out, _ = run(*words, "--json")
    made = json.loads(out)
    assert [row["ranks"] for row in made["scaling"]["strong"]] == [8, 16, 64]
    assert made["scaling"]["weak"][0]["efficiency"] == 1.0 and made["error"]["median"] is None


def test_Simulate_Routing_IsUsed(tmp_path, run) -> None:
    path = _trace(tmp_path, [[[4, 0, 2, 2]]])
    words = ["--machine", "h200-8x8", "--scaling", "strong", "--experts", "4", *FLAGS, "--routing", path, "--json"]
    status, out, _ = run(*words, "--ranks", "4")
    assert status == 0 and json.loads(out)["scaling"]["strong"][0]["skew_median"] == 2.0
    status, _, err = run(*words, "--experts", "8", "--ranks", "4")
    assert status == 2 and "recorded with 4 experts, asked about 8" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "2"], r"asked about 2 at 2 ranks by weak scaling: give --experts-per-rank 2$"),
        (["--ranks", "4", "--experts-per-rank", "3"], r"asked about 12 at 4 ranks.*: give --experts-per-rank 1$"),
        (["--ranks", "2,4"], r"give one number of ranks, --ranks 4 --experts-per-rank 1, or --scaling strong --exp"),
        (["--ranks", "3"], r"choose --ranks that divide 4, or give --scaling strong --experts 4 or --skew"),
        (["--ranks", "2", "--scaling", "both", "--experts", "8"], r"asked about 8 by strong scaling: give --experts 4"),
    ],
)
def test_Simulate_TraceOfOtherExperts_SaysWhichOptionsFit(words: list[str], text: str, tmp_path, run) -> None:
    path = _trace(tmp_path, [[[1, 1, 1, 1]]])
    status, _, err = run("--machine", "h200-8x8", *FLAGS, "--top-k", "1", "--routing", path, *words)
    assert status == 2 and "recorded with 4 experts" in err and re.search(text, err.strip()), err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "8,x"], "'8,x' is not a list of whole numbers"),
        (["--ranks", "0"], r"--ranks: 0 is not in \[1, 16384\]"),
        (["--ranks", "16385"], r"--ranks: 16385 is not in \[1, 16384\]"),
        (["--ranks", "64,8"], "must ascend"),
        (["--ranks", "8", "--scaling", "strong"], "--experts is missing"),
        (["--ranks", "8", "--skew", "2", "--zipf", "1"], "exclude each other"),
        (["--ranks", "8", "--other-ms", "-1"], "--other-ms is -1"),
        (["--ranks", "8", "--other-ms", "nan"], "--other-ms is nan"),
        (["--ranks", "8", "--other-ms", "inf"], "--other-ms is inf"),
        (["--ranks", "8", "--experts", "12"], "12 experts do not divide over 8 ranks: .* or give --experts-per-rank"),
        (["--ranks", "8,16", "--experts", "4"], "4 experts do not divide over 8 ranks"),
        (["--ranks", "8", "--skew", "0.5"], "skew is 0.5"),
        (["--ranks", "8", "--routing", "no.jsonl"], "no.jsonl: No such file"),
        (["--ranks", "8", "--picture", "no/such/x.svg"], "--picture .*: there is no folder no/such"),
        (["--ranks", "1", "--experts-per-rank", "1"], "fewer than --top-k 2"),
    ],
)
def test_Simulate_BadInput_IsNamed(words: list[str], text: str, run) -> None:
    status, _, err = run("--machine", "h200-8x8", *FLAGS, *words)
    assert status == 2 and re.search(text, err), err


def test_Simulate_BudgetTooSmall_IsStatusOne(run) -> None:
    status, out, _ = run("--machine", "h200-8x8", "--ranks", "8", *FLAGS, "--budget", "1MiB")
    assert status == 1 and "does not fit" in out


# 64 tokens, each to 2 of 8 experts: 16 rows an expert, of 2 ranks.
LAYER = Workload(32, 128, 64, 8, 2, 2, "f32")
PLAIN = {"sluice_machine": 2, "name": "plain", "gemm": {"f32": {"flops_per_second": 1e9}},
         "rows": {"bytes_per_second": 1e9}, "exchange": {"bytes_per_second": 1e6, "startup_seconds": 1e-3},
         "host_copy": {"bytes_per_second": 1e9}}  # fmt: skip


def _rates(**changes) -> Rates:
    return Rates(Planner(machines.Machine({**PLAIN, **changes}, {})))


@pytest.mark.parametrize(("expert_skew", "slots"), [(1.0, 16), (2.5, 40), (9.0, 64)])
def test_StockDeepSpeed_EveryExpertHasRoomForTheFullest(expert_skew: float, slots: int) -> None:
    """A token goes to an expert once, so an expert gets at most 64 rows."""
    step = stock.deepspeed(LAYER, _rates(), expert_skew)
    assert step.rows == 8 * slots
    gate = 3 * 2 * 64 * 32 * 8 + 8 * 64 * 8
    assert step.flops == 3 * 2 * 8 * slots * 2 * 32 * 128 + gate
    assert step.sent == 4 * 8 * slots * 32 * 4 / 2
    assert step.kept == 4 * (8 * slots * (32 + 2 * 128) + 128 * 32)
    agreed = 1e-3  # the agreement on the capacity sends almost no bytes
    assert step.seconds["exchange"] == pytest.approx(4 * (1e-3 + step.sent / 4 / 1e6) + agreed, rel=0.01)
    assert step.seconds["computation"] == pytest.approx((step.flops - gate) / 1e9)


def test_StockMegatron_MultipliesAndSendsRealRowsAlone() -> None:
    for fullest in (1.0, 1.5):
        step = stock.megatron(LAYER.with_(skew=fullest), _rates(), 4.0)
        rows = 128 * fullest
        assert step.rows == rows and step.kept == 4 * rows * (32 + 3 * 128)
        assert step.sent == 4 * rows * 32 * 4 / 2 + 2 * rows * 4 / 2
    several = stock.megatron(LAYER, _rates(gemm_call_seconds=1.0), grouped=False)
    grouped = stock.megatron(LAYER, _rates(gemm_call_seconds=1.0))
    assert several.seconds["computation"] - grouped.seconds["computation"] == pytest.approx(3 * 2 * (4 - 1))


def test_Stock_OneRank_ExchangesNothing_AndADeviceHidesCalls() -> None:
    for model in stock.MODELS.values():
        step = model(LAYER.with_(world_size=1), _rates(), op_seconds=1e-6)
        assert step.sent == 0 and step.seconds["exchange"] == 0
        assert step.seconds["calls"] == pytest.approx(1e-6 * step.calls)
        assert model(LAYER.with_(world_size=1), _rates(), op_seconds=1e-6, is_device=True).seconds["calls"] == 0
        slow = model(LAYER.with_(world_size=1), _rates(), op_seconds=1.0, is_device=True)
        assert sum(slow.seconds.values()) == pytest.approx(slow.calls)


@pytest.mark.parametrize("name", machines.names())
def test_Rates_AreThoseThatTheLibraryPricesWith(name: str) -> None:
    """One chunk that keeps everything: its lanes are the sums of its ops."""
    machine = machines.load(name)
    missed = {"cache_miss_forward": {"points": [[1e6, 1.0], [1e9, 1.5]]}}
    data = {**machine.data, "share": [], "gemm_call_seconds": 0.0, "op_seconds": 0.0, **missed}
    planner = Planner(machines.Machine(data, {}))
    rates, work = Rates(planner), Workload(1024, 4096, 4096, 64, 2, 64, "f16")
    made = planner.predict(work, Choice(1, "keep", "keep", "deferred"))
    rows, flops = 8192.0, 2.0 * 8192 * 1024 * 4096 * 2
    forward = flops * rates.gemm("f16", "forward", rows) + rows * 4096 * rates.activation(None, False)
    factor = rates.cache_miss(False, rows * (1024 + 4096) * 2)
    assert factor > 1 and made.forward_busy["compute"] == pytest.approx(forward * factor)
    exchanged = rates.exchange(64, rows * 2048 * 63 / 64)
    moved = rates.rows(rows * 2048)
    packed = rates.rows(rows * 2048 * 63 / 64)
    assert made.forward_busy["comm"] == pytest.approx(2 * (exchanged + packed + moved), rel=1e-3)


def test_Simulate_StockStandsBelowSluice_WithASentence(run) -> None:
    words = ["--machine", "h200-8x8", "--ranks", "64", *MIXTRAL[2:], "--experts", "64", "--zipf", "0.3"]
    status, out, _ = run(*words)
    assert status == 0 and "a model of DeepSpeed's MoE layer without dropping" in out
    (point,) = json.loads(run(*words, "--json")[1])["scaling"]["weak"]
    for name in ("DeepSpeed", "Megatron-Core"):
        other = point["stock"][name]
        row = re.search(rf"\n +stock {name} +([\d.]+) ", out)
        assert row and float(row[1]) == pytest.approx(1e3 * other["seconds"], abs=0.01)
        found = re.search(
            rf"Sluice's step takes ([\d.]+) ms, stock {name}'s ([\d.]+) ms \(a model\): Sluice is ([\d.]+) times as "
            r"fast; stock has ([\d.]+) ms (more|less) of exchanges .* and ([\d.]+) ms (more|less) of computation",
            out,
        )
        assert found, out
        ours, stocks, ratio, rest, computed = (float(found[index]) for index in (1, 2, 3, 4, 6))
        assert ratio == pytest.approx(stocks / ours, abs=0.006)
        signs = [1 if found[index] == "more" else -1 for index in (5, 7)]
        assert stocks - ours == pytest.approx(signs[0] * rest + signs[1] * computed, abs=0.05)
    frozen = run(*words, "--lora-rank", "8")[1]
    assert "stock" not in frozen


def test_Simulate_HotExpertAmongSeveralOfARank_PadsDeepSpeedAlone(tmp_path, run) -> None:
    path = _trace(tmp_path, [[[6, 0, 3, 3]]])  # of ranks even, of experts 2
    words = ["--machine", "h200-8x8", *FLAGS, "--routing", path, "--ranks", "2", "--experts-per-rank", "2"]
    (point,) = json.loads(run(*words, "--json")[1])["scaling"]["weak"]
    assert point["skew_max"] == 1.0
    assert {name: other["rows_over_real"] for name, other in point["stock"].items()} == {
        "DeepSpeed": 2.0, "Megatron-Core": 1.0}  # fmt: skip
    assert "(100 % more rows, for padding)" in run(*words)[1]


def test_Simulate_StockKeepsMoreThanTheDeviceHas_SaysSo(run) -> None:
    words = ["--machine", "a100-8x8-200g", "--ranks", "8", *MIXTRAL, "--budget", "18GiB"]
    status, out, _ = run(*words)
    assert status == 0 and len(re.findall(r"stock .* too large\n", out)) == 2
    assert out.count("(a model, if the device had the memory)") == 2
