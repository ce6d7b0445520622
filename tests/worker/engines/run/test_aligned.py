"""The aligned runner alone: any family, in any batch, with repeated steps, forks and freed rows."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.worker.families import SHALLOW
from tests.worker.loaded import generated, reference
from tests.worker.scheduled import sequence
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.self_check import check
from worker.engines.transformers.run.warmup import compute_largest_steps
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence

CPU = torch.device("cpu")
NEW, ROWS, WIDTH, CHUNK = 32, 4, 128, 16
KINDS = {
    "llama": "keys and values",
    "gemma3_text": "windows in some layers",
    "deepseek_v3": "compressed rows",
    "jamba": "states that cannot be carried on by several tokens",
    "falcon_h1": "states beside keys",
    "t5": "an encoder",
    "bart": "an encoder, and positions that cannot be passed",
}


def made(family: str, folder: Path, **settings: Any) -> tuple[Any, AlignedRunner]:
    """A model, and a runner that has passed its self-check."""
    model = reference(tiny.make(family, folder, **settings)).eval()
    runner = AlignedRunner(model, rows=ROWS, ctx_size=WIDTH, chunk=CHUNK, device=CPU)
    check(runner)
    return model, runner


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed + length).choices(range(2, 500), k=length)


def said(runner: AlignedRunner, row: int, asked: Sequence, count: int) -> list[int]:
    """Greedy tokens of `asked`, alone in its row."""
    for _ in range(count):
        segment = Segment(asked, row, asked.computed, asked.pending)
        asked.tokens.append(int(runner.run((segment,))[-1].argmax()))
        asked.computed = segment.end
    return asked.tokens[asked.prompt_tokens :]


@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_the_largest_step_of_a_model_with_states_computes_a_chunk_in_one_forward(family: str, tmp_path: Path) -> None:
    """Also of code that continues a state with one token at a time."""
    model, runner = made(family, tmp_path)
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda model, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    compute_largest_steps(runner, RowAllocator(ROWS, WIDTH), chunk=CHUNK, ctx_size=WIDTH)
    assert max(lengths) == CHUNK
    assert len(lengths) == 3, "the decodes beside it, the chunk, and all decodes"


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_text_equals_generate_while_requests_join_end_and_are_preempted(family: str, tmp_path: Path) -> None:
    """Segments in any order and of any length; steps repeated as a whole and one by one, as after a failure."""
    model, runner = made(family, tmp_path, seed=2 if family == "t5" else 0, **SHALLOW.get(family, {}))
    model.generation_config.eos_token_id = None
    prompts = [prompt(length) for length in (1, 7, 23, 60, 2, 11)]
    expected = [generated(model, each, NEW) for each in prompts]
    choose = random.Random(1)
    waiting = [(number % len(prompts), number) for number in range(10)]
    running: dict[int, tuple[int, Sequence]] = {}
    finished = 0
    while waiting or running:
        free = [row for row in range(ROWS) if row not in running]
        if waiting and free and choose.random() < 0.5:
            which, id = waiting.pop()
            running[choose.choice(free)] = which, sequence(id, prompts[which])
        batch = []
        for row, (_, each) in running.items():
            length = 1 if each.is_decoding else min(each.pending, choose.choice((3, CHUNK)))
            if choose.random() < 0.9:  # some sequences are left out of a step
                batch.append(Segment(each, row, each.computed, length))
        choose.shuffle(batch)
        if choose.random() < 0.2:
            runner.run(tuple(batch))
        logits = runner.run(tuple(batch))
        if choose.random() < 0.2:
            alone = [runner.run((segment,)) for segment in batch]
            again = torch.cat([each for each in alone if len(each)] or [logits])
            torch.testing.assert_close(again, logits, rtol=1e-2, atol=1e-3)
        rows = iter(logits)
        for segment in batch:
            each = segment.sequence
            each.computed = segment.end
            if not segment.completes:
                continue
            each.tokens.append(int(next(rows).argmax()))
            which = running[segment.row][0]
            answer = each.tokens[each.prompt_tokens :]
            assert answer == expected[which][: len(answer)]
            if len(answer) == NEW or choose.random() < 0.02:  # cancelled
                finished += len(answer) == NEW
                runner.forget(segment.row)
                del running[segment.row]
        assert next(rows, None) is None
    assert finished >= 4
    assert len({token for answer in expected for token in answer}) > 10, "the text is varied enough for the comparison"


@pytest.mark.parametrize("family", ["llama", "jamba", "t5"])
def test_a_fork_goes_on_as_its_source_would(family: str, tmp_path: Path) -> None:
    _, runner = made(family, tmp_path)
    one = sequence(0, prompt(20))
    runner.run((Segment(one, 0, 0, 20),))
    runner.fork(0, 2)
    one.computed = 20
    one.tokens.append(5)
    other = sequence(1, prompt(20))
    other.tokens.append(9)
    other.computed = 20
    both = runner.run((Segment(one, 0, 20, 1), Segment(other, 2, 20, 1)))
    for row, token in ((0, 5), (1, 9)):
        fresh = sequence(2, prompt(20))
        runner.run((Segment(fresh, 3, 0, 20),))
        fresh.tokens.append(token)
        torch.testing.assert_close(runner.run((Segment(fresh, 3, 20, 1),))[0], both[row], rtol=1e-4, atol=1e-4)
        runner.forget(3)


@pytest.mark.parametrize("family", ["llama", "mamba", "falcon_h1"])
def test_logits_of_a_whole_prompt_are_those_of_one_forward(family: str, tmp_path: Path) -> None:
    model, runner = made(family, tmp_path)
    asked = sequence(0, prompt(21), prompt_logprobs=True)
    found = torch.cat([runner.run((Segment(asked, 0, start, 7),)) for start in (0, 7, 14)])
    with torch.inference_mode():
        expected = model(torch.tensor([asked.tokens])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "jamba", "t5"])
def test_nothing_grows_and_the_bytes_are_those_that_were_promised(family: str, tmp_path: Path) -> None:
    _, runner = made(family, tmp_path)
    buffers = [*runner._cache._all(), *runner._cache._scratch.values()]
    places = [each.data_ptr() for each in buffers]
    assert runner.bytes_on(torch.device("cpu")) == sum(each.untyped_storage().nbytes() for each in buffers)
    said(runner, 0, sequence(0, prompt(30)), 20)
    said(runner, 1, sequence(1, prompt(60)), 3)
    assert [each.data_ptr() for each in (*runner._cache._all(), *runner._cache._scratch.values())] == places


@pytest.mark.parametrize("family", ["llama", "jamba", "t5"])
def test_numbers_that_are_none_end_with_their_row(family: str, tmp_path: Path) -> None:
    _, runner = made(family, tmp_path)
    expected = said(runner, 0, sequence(0, prompt(9)), 6)
    runner.forget(0)
    for row in range(ROWS):  # so that any buffer row that is given next has been written
        runner.run((Segment(sequence(row, prompt(40)), row, 0, 40),))
        buffer_row, begin = runner._alignment.buffer_row(row), runner._alignment.begin(row)
        for buffer in runner._cache._key_value_buffers:
            buffer[buffer_row, :, begin : begin + runner._lengths[row]] = torch.nan
        for buffer in runner._cache._cross_buffers:
            buffer[buffer_row, :, :40] = torch.nan
        for pair in runner._cache._states:
            pair[0][buffer_row] = torch.nan
    for row in range(ROWS):
        runner.forget(row)
    long, short = sequence(0, prompt(50)), sequence(1, prompt(9))
    said(runner, 0, long, 4)
    for _ in range(6):
        batch = (Segment(long, 0, long.computed, 1), Segment(short, 1, short.computed, short.pending))
        for segment, logits in zip(batch, runner.run(batch), strict=True):
            assert bool(logits.isfinite().all())
            segment.sequence.computed = segment.end
            segment.sequence.tokens.append(int(logits.argmax()))
    assert short.tokens[9:] == expected
