"""Memory with pages that are mapped later: content stays, and the reported bytes are right."""

import asyncio
import ctypes
import os
import queue
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.fakes import DEADLINE
from tests.worker.loaded import complete_one, load, options, serving
from worker.engines.transformers.device.lazy_pages import LazyPages, claim, claiming
from worker.engines.transformers.engine import TransformersEngine
from worker.protocol.events import Pulse

MIB = 1 << 20
CPU = torch.device("cpu")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _trimmed() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed is not to serve


def test_memory_that_is_claimed_is_zeros_and_there_at_once() -> None:
    before = resident()
    claimed = claim(3, 16 * MIB, dtype=torch.uint8, device=CPU)
    assert resident() - before > 47 * MIB
    assert not claimed.any()


def test_mapping_pages_later_keeps_their_content() -> None:
    before = resident()
    with claiming() as claims:
        claimed = claim(3, 16 * MIB, dtype=torch.uint8, device=CPU)
        small = claim(5, dtype=torch.float32, device=CPU)
    assert resident() - before < 4 * MIB
    assert claims.left == 48 * MIB, "the small one is there"
    claimed[1] = 7
    claims.start()
    claims.finish()
    assert claims.left == 0
    assert resident() - before > 47 * MIB
    assert [int(each.sum()) for each in claimed] == [0, 7 * 16 * MIB, 0]
    assert not small.any()


def test_pages_are_mapped_after_more_urgent_ones() -> None:
    urgent, seen = LazyPages(), list[int]()
    urgent.add(torch.zeros(8, dtype=torch.uint8), lambda area: seen.append(claims.left))
    with claiming(urgent) as claims:
        claim(4 * MIB, dtype=torch.uint8, device=CPU)
    claims.start()
    claims.finish()
    assert (seen, claims.left) == ([4 * MIB + 8], 0)


async def test_every_pulse_contains_the_memory_still_to_come(tmp_path: Path) -> None:
    """Weights and cache pages that are not mapped yet count: estimates are learned from these figures."""
    folder = tiny.make("llama", tmp_path / "model")
    pulses: queue.SimpleQueue[Pulse] = queue.SimpleQueue()
    asked = options(folder, ctx_size=512, parallel=64, warm_up=False)  # a warmup maps the weights
    engine = TransformersEngine.load(asked, progress=lambda event: None, pulse=pulses.put)
    async with serving(engine):
        at_ready = engine.later
        first = await asyncio.to_thread(pulses.get, timeout=DEADLINE)
        assert first.later == at_ready
        engine.map_rest()
        assert (await complete_one(engine, (9, 41, 70), max_tokens=4)).finish == "length"
        engine._unmapped.finish()
        came = at_ready - engine.later
        weights = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
        assert came == weights + engine._unmapped.taken > weights + 2 * MIB
    async with serving(load(folder, ctx_size=512, parallel=64)) as other:
        assert (await complete_one(other, (9, 41, 70), max_tokens=4)).finish == "length", "mapping is optional"
