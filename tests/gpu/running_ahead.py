"""The gain of launching steps ahead on a device: tokens per second, as JSON, for `scripts/gpu_check`.

python -m tests.gpu.running_ahead --device cuda:0 --hidden 2048 --layers 16 --requests 16 --tokens 256
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import tiny
from tests.worker.loaded import collect_choices, generation, load, serving
from worker.interface import SamplingParams


async def measure(folder: Path, asked: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Of requests that all decode at once, the median of three rounds; and how many steps were launched ahead."""
    length = 64 + asked.tokens
    engine = load(folder, devices=(asked.device,), ctx_size=length, parallel=asked.requests, **changes)
    work = engine._generation
    assert work is not None
    speeds = []
    async with serving(engine):
        for _ in range(3):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            wanted = [
                generation(range(5, 5 + 16 + each % 32), sampling=sampling, max_tokens=asked.tokens)
                for each in range(asked.requests)
            ]
            begin = time.monotonic()
            told = await asyncio.gather(*(collect_choices(engine, each) for each in wanted))
            speeds.append(sum(len(each.tokens) for (each,) in told) / (time.monotonic() - begin))
        return {
            "tokens_per_second": statistics.median(speeds),
            "steps": engine.occupancy.steps,
            "steps_ahead": work.steps_ahead,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    for name, default in (("hidden", 2048), ("layers", 16), ("requests", 16), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = tiny.make(
            "llama", Path(name), hidden_size=asked.hidden, intermediate_size=asked.hidden * 3, dtype="bfloat16",
            num_hidden_layers=asked.layers, num_attention_heads=asked.hidden // 64,
            num_key_value_heads=asked.hidden // 128, max_position_embeddings=64 + asked.tokens, initializer_range=0.02,
        )  # fmt: skip
        found = {
            "step by step": asyncio.run(measure(folder, asked, ahead=False)),
            "ahead": asyncio.run(measure(folder, asked, ahead=True)),
            "step by step, no graphs": asyncio.run(measure(folder, asked, ahead=False, enforce_eager=True)),
            "ahead, no graphs": asyncio.run(measure(folder, asked, ahead=True, enforce_eager=True)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
