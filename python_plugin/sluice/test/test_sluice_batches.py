# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice simulate --stages`: published bubbles, the best policy, budgets, and errors that name the option."""

import json
from xml.etree import ElementTree

import pytest
from sluice.errors import InvalidArgument
from sluice.planning import batches, batches_command

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(command):
    return lambda text: command("simulate", *text.split())


ALIKE = "--stages 8 --micro-batches 16 --forward 0.02 --backward 0.02 --weight 0.02"


def test_Stages_EqualParts_HaveThePublishedBubbles(run) -> None:
    status, out, err = run(f"{ALIKE} --in-flight 8 --json")
    assert (status, err) == (0, "")
    bubbles = {each["name"]: each["bubble"] for each in json.loads(out)["policies"]}
    for name, bubble in (("zero_bubble", 0.127), ("backward_first W apart", 0.127), ("1f1b", 0.304)):
        assert bubbles[name] == pytest.approx(bubble, abs=6e-4), name
    status, out, _ = run(f"{ALIKE} --virtual 2 --json".replace("0.02", "0.01"))
    found = json.loads(out)
    bubbles = {each["name"]: each["bubble"] for each in found["policies"]}
    assert bubbles["v"] == pytest.approx(0.086, abs=6e-4) and bubbles["looped"] == pytest.approx(0.179, abs=6e-4)
    assert found["best"] == min(bubbles, key=bubbles.get) == "backward_first W apart"  # in more bytes than v
    assert "zero_bubble" in found["refused"] and "virtual stages" in found["refused"]["zero_bubble"]


def test_Stages_ATable_SaysTheBestAndWhyOthersAreNotThere(run) -> None:
    status, out, err = run(f"{ALIKE} --virtual 2 --activation-bytes 100MiB --layers 128")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    rows = [line.split() for line in lines[3:] if line.startswith("  ") and "%" in line]
    seconds = [float(line.split(" % ")[0].split()[-2]) for line in lines if " % " in line]
    assert len(rows) >= 4 and seconds == sorted(seconds)
    assert lines[3].endswith("best") and "GiB" in lines[3]
    assert any(line.startswith("  not 1f1b: ") for line in lines)
    assert "every 8. layer (of the factors of N / P" in lines[-1]


def test_Stages_UnderABudget_StayInsideOrSayThatNothingFits(run) -> None:
    words = f"{ALIKE} --activation-bytes 100MiB --held-bytes 10MiB"
    found = json.loads(run(f"{words} --json --budget 450MiB")[1])
    assert found["policies"] and all(each["most_bytes"] <= 450 << 20 for each in found["policies"])
    assert "bytes" in found["refused"]["gpipe"] and "bytes" in found["refused"]["1f1b"]
    free = json.loads(run(f"{words} --json")[1])
    assert free["policies"][0]["seconds"] < found["policies"][0]["seconds"]
    status, out, _ = run(f"{words} --budget 90MiB")
    assert status == 1 and "not backward_first: " in out and " best" not in out


def test_Stages_Picture_DrawsBatchesOfTheFastestPoliciesAndBytesAgainstTheBudget(run, tmp_path) -> None:
    path = tmp_path / "batch.svg"
    words = f"{ALIKE} --activation-bytes 100MiB --held-bytes 10MiB --budget 850MiB"
    status, out, err = run(f"{words} --picture {path}")
    assert (status, err) == (0, "")
    drawn = ElementTree.parse(path)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    titles = [text for text in texts if ", bubble " in text]
    assert [title.split(":")[0] for title in titles] == [line[2:26].strip() for line in out.splitlines()[3:7]]
    assert all("of 850 MiB" in title for title in titles) and sum("budget 850 MiB" in text for text in texts) == 4
    tips = [t.text for rect in drawn.iter(f"{SVG}rect") for t in rect]
    for op in ("forward forward", "backward backward"):
        assert sum(tip.startswith(f"{op} layer ") for tip in tips) == 4 * 8 * 16, op
    for peak in (float(text.split()[1]) for text in texts if text.startswith("peak ")):
        assert 100 <= peak <= 850


@pytest.mark.parametrize(("policy", "stages"), [("v", "0110"), ("looped", "0101")])
def test_Stages_Picture_PutsVirtualStagesWhereTheyRun(policy: str, stages: str) -> None:
    parsed = batches.Batch(2, 2, [1.0] * 4, [1.0] * 4, [1.0] * 4, num_virtual=2, policy=policy)
    events = batches_command._events(parsed, batches.predict(parsed))
    rank_of = {event.layer: event.rank for event in events if event.op == "forward"}
    assert "".join(str(rank_of[c]) for c in range(4)) == stages
    for rank in range(2):  # one op at a time
        own = sorted((e.begin, e.end) for e in events if e.rank == rank and e.lane == "compute")
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in zip(own, own[1:]))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--stages 4 --forward 1,2 --backward 1", "--forward has 2 values: give one, or 4"),
        ("--stages 4 --forward x --backward 1", "'x' is no number of seconds"),
        ("--stages 0 --forward 1 --backward 1", "--stages is 0"),
        ("--stages 4 --forward 1 --backward 1 --policy best", "--policy is 'best'; known are message_driven"),
    ],
)
def test_Stages_WrongArguments_AreNamed(run, words: str, named: str) -> None:
    status, out, err = run(words)
    assert (status, out) == (2, "") and named in err, err


def test_CheckpointInterval_IsTheRootOfAStagesLayers() -> None:
    assert [batches.checkpoint_interval(layers, 4) for layers in (4, 64, 96, 2)] == [1, 8, 8, 1]
    # AxoNN's models and stages: a factor of N / G_inter, the one nearest to sqrt(N).
    pairs = ((48, 6), (48, 12), (96, 24), (96, 48), (48, 1), (60, 4))
    assert [batches.checkpoint_interval(*pair) for pair in pairs] == [8, 4, 4, 2, 6, 5]


def _alike(policy: str, **changed) -> batches.Batch:
    return batches.Batch(4, 8, [1.0] * 4, [1.0] * 4, [1.0] * 4, policy=policy, **changed)


def test_Predict_SecondsOfEachOp_TakeTheirPlaceAndErrorsPass() -> None:
    asked = []

    def longer(op: str, stage: int, micro_batch: int, begin_s: float, seconds: float) -> float:
        asked.append((op, stage, micro_batch, begin_s))
        return 2 * seconds

    usual = batches.predict(_alike("1f1b")).seconds
    assert batches.predict(_alike("1f1b", op_seconds=longer)).seconds == pytest.approx(2 * usual)
    assert {op for op, *_ in asked} == {"forward", "backward", "send_activation", "send_gradient"}
    assert ("forward", 3, 7) in {each[:3] for each in asked} and max(each[3] for each in asked) > usual

    def fails(*_: object) -> float:
        raise ZeroDivisionError("a draw")

    with pytest.raises(ZeroDivisionError, match="a draw"):
        batches.predict(_alike("1f1b", op_seconds=fails))
    with pytest.raises(InvalidArgument, match="the time of forward of micro-batch 0"):
        batches.predict(_alike("1f1b", op_seconds=lambda *_: -1.0))
