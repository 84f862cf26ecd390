"""What the benchmarks list of memory at its peak: on a made-up log, and of a real block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from integration_tests.benchmarks.memory import memory, memory_blocks

# A 100 stays, a 50 comes and goes, its place is taken by a 60, a gradient of 70 is kept, another 100 goes after all.
LOG = [(1000, 100), (2000, 50), (2000, -50), (2000, 60), (3000, 70), (4000, 100), (4000, -100), (3000, -70)]


def test_AtPeak_KeptGradientsAndFreedBlocks_AreNotListed() -> None:
    events = np.array(LOG, dtype=memory.EVENT)
    delta = memory.changes(events, [memory.Kept(6, (3008,))])
    alive = memory_blocks.at_peak(events, delta)
    assert alive == [0, 3, 5]
    assert delta[alive].sum() == np.cumsum(delta).max() == 260


def test_Listed_EqualBlocks_StandTogetherTheMostFirst() -> None:
    events = np.array(LOG, dtype=memory.EVENT)
    delta = memory.changes(events, [memory.Kept(6, (3008,))])
    blocks = memory_blocks.listed(events, delta, lambda index: [])
    assert [(b["bytes"], b["count"]) for b in blocks] == [(100, 2), (60, 1)]
    lines = memory_blocks.said(blocks, most=1)
    assert len(lines) == 2 and "2 x" in lines[0] and "and 1 more" in lines[1]


def test_Watch_WithSites_NamesWhoAskedForATensor(root: str, tmp_path: Path) -> None:
    path, why = memory.build_watch(tmp_path)
    if path is None:
        pytest.skip(why)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import json, torch\n"
        "from integration_tests.benchmarks.memory import memory, memory_blocks\n"
        "w = memory.Watch(); w.start(sites=True); t = torch.randn(2**18)\n"
        "events = w.stop(); delta = memory.changes(events, [])\n"
        "print(json.dumps(memory_blocks.listed(events, delta, w.site)))\n"
    )
    command = [sys.executable, "-c", script, root]
    done = subprocess.run(command, capture_output=True, text=True, env={"LD_PRELOAD": str(path)})
    assert done.returncode == 0, done.stderr[-2000:]
    first = json.loads(done.stdout)[0]
    assert 2**20 <= first["bytes"] < 2**20 + 65536 and first["count"] == 1
    assert "randn" in first["site"], first
