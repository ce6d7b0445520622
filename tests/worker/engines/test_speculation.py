"""Speculative decoding: answers are the same with drafts of any quality, for every kind of request."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import lora, tiny
from tests.worker.drafts import ALWAYS, Oracle, drafting
from tests.worker.every_kind import NEW, comparable, prompts, requests
from tests.worker.loaded import (
    DEADLINE,
    GREEDY,
    CollectedChoice,
    collect_choices,
    complete_one,
    generated,
    generation,
    load,
    put_back_the_youngest,
    reference,
    serving,
    work_of,
)
from tests.worker.scheduled import FixedLength, check_scheduler
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import architectures
from worker.engines.transformers.loop.drafting import Drafter
from worker.engines.transformers.loop.generation_loop import GenerationLoop
from worker.engines.transformers.loop.requests import RequestChoice
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.draft_model import DraftModel
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.sample.work_thread import Job, WorkThread
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import PenaltyCounts
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.schedule.speculation import DraftLength, DraftLimits
from worker.errors import StartError
from worker.interface import AdapterChoice, GenerationRequest, Grammar, SamplingParams
from worker.prompt import tools
from worker.prompt.chat_formats import find
from worker.protocol.argv import AdapterSource, encode_adapters
from worker.protocol.vocabulary import vocabulary_fault

CTX = 128


def speculating(folder: Path, **changes: Any) -> TransformersEngine:
    return load(folder, **{"ctx_size": CTX, "parallel": 4, "prefill_chunk": 16, "ngram_size": 2, **changes})


async def answers(engine: TransformersEngine, wanted: Sequence[GenerationRequest]) -> list[list[CollectedChoice]]:
    async with asyncio.timeout(DEADLINE):
        found = await asyncio.gather(*(collect_choices(engine, request) for request in wanted))
    check_scheduler(work_of(engine)._scheduler)
    return found


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[list[CollectedChoice]]:
    """The answers without drafts."""

    async def run() -> list[list[CollectedChoice]]:
        async with serving(load(llama, ctx_size=CTX, parallel=4, prefill_chunk=16)) as engine:
            return await answers(engine, requests())

    return asyncio.run(run())


class Alternating(DraftLength):
    """Drafts in two of three steps."""

    def __init__(self) -> None:
        super().__init__((0, 4))
        self.turn = 0

    def choose(self, rows: int) -> int:
        return 4 * (self.turn % 3 > 0)

    def learn(self, rows: int, length: int, tokens: int, seconds: float, catch_up: float = 0.0) -> None:
        self.turn += 1


def known_texts(choices: Sequence[Sequence[CollectedChoice]]) -> list[list[int]]:
    """Prompts and answers of `requests`."""
    return [
        [*request.prompt, *choice.tokens, *choice.deltas[-1].hidden_tokens]
        for request, answered in zip(requests(), choices, strict=True)
        for choice in answered
    ]


@pytest.mark.parametrize(("quality", "ahead"), [(0.0, False), (1.0, False), (1.0, True)])
async def test_every_kind_of_request_gets_the_answer_it_gets_without_drafts(
    llama: Path, plain: list[list[CollectedChoice]], quality: float, ahead: bool
) -> None:
    async with serving(speculating(llama, ahead=ahead)) as engine:
        drafter = drafting(engine, Oracle(quality, known_texts(plain)), Alternating() if ahead else ALWAYS)
        for _ in range(2):  # the second time with cached prefixes
            assert comparable(await answers(engine, requests())) == comparable(plain)
        assert (work_of(engine).steps_ahead > 0) == ahead
    assert drafter.drafted > 100
    assert sum(drafter.accepted_at) == drafter.accepted
    assert sorted(drafter.accepted_at, reverse=True) == drafter.accepted_at, "a token is accepted after those before it"
    if quality:
        assert drafter.accepted > drafter.drafted / 2
    else:
        assert drafter.accepted < drafter.drafted / 10


async def test_prompt_lookup_gives_the_tokens_of_generate_and_accepts_repeated_text(llama: Path) -> None:
    model = reference(llama)
    async with serving(speculating(llama)) as engine:
        drafter = drafting(engine)
        text = prompts()[2] * 3
        found = await asyncio.gather(*(complete_one(engine, text[:size], max_tokens=NEW) for size in (30, 34, 51)))
        for size, choice in zip((30, 34, 51), found, strict=True):
            assert choice.tokens == generated(model, text[:size], NEW)
    assert drafter.drafted > 0


async def test_preempted_sequences_keep_their_text_in_a_pool_too_small_for_all_drafts(llama: Path) -> None:
    model = reference(llama)
    wanted = [generated(model, prompt, NEW) for prompt in prompts()]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), wanted, strict=True)]
    async with serving(speculating(llama, kv_tokens=CTX)) as engine:
        drafter = drafting(engine, Oracle(0.9, texts), FixedLength(16))
        tasks = [asyncio.create_task(complete_one(engine, prompt, max_tokens=NEW)) for prompt in prompts()]
        async with asyncio.timeout(DEADLINE):
            while not all(task.done() for task in tasks):
                put_back_the_youngest(engine)
                await asyncio.sleep(0.001)
        check_scheduler(work_of(engine)._scheduler)
    assert [task.result().tokens for task in tasks] == wanted
    assert drafter.accepted > 0


@pytest.mark.parametrize("quality", [0.0, 1.0])
async def test_sampled_tokens_keep_the_distribution_of_the_model(llama: Path, quality: float) -> None:
    """The second and third token of many seeds, against the model's own probabilities."""
    prompt, seeds = prompts()[1], 900
    warm = SamplingParams(temperature=0.7, top_k=4)
    model = reference(llama)
    exact: dict[tuple[int, ...], float] = {}

    def expand(tokens: tuple[int, ...], share: float) -> None:
        if len(tokens) == 3:
            exact[tokens] = share
            return
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        top = logits.topk(4)
        for token, chance in zip(top.indices.tolist(), (top.values / 0.7).softmax(-1).tolist(), strict=True):
            expand((*tokens, token), share * chance)

    expand((), 1.0)
    likeliest = max(exact, key=lambda tokens: exact[tokens])
    async with serving(speculating(llama, parallel=32, prefill_chunk=128)) as engine:
        drafter = drafting(engine, Oracle(quality, [[*prompt, *likeliest]]))
        found = await answers(
            engine, [generation(prompt, max_tokens=3, sampling=replace(warm, seed=seed)) for seed in range(seeds)]
        )
    assert drafter.drafted == seeds
    seen = Counter(tuple(choice.tokens) for (choice,) in found)
    assert set(seen) <= set(exact)
    # Pearson's statistic: its mean is the number of outcomes less one, its deviation the root of twice that.
    statistic = sum((seen[tokens] - seeds * share) ** 2 / (seeds * share) for tokens, share in exact.items())
    assert statistic < len(exact) - 1 + 5 * (2 * (len(exact) - 1)) ** 0.5


async def test_a_request_may_turn_drafts_off_or_make_them_shorter(llama: Path) -> None:
    lengths: list[int] = []

    class Journal(Oracle):
        def draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> list[list[int]]:
            lengths.extend(segment.draft_room for segment in segments)
            return super().draft(batch, segments, saving)

    async with serving(speculating(llama)) as engine:
        drafting(engine, Journal(0.0))
        off = await complete_one(engine, prompts()[1], max_tokens=9, draft_max=0)
        assert not lengths
        short = await complete_one(engine, prompts()[1], max_tokens=9, draft_max=2)
        assert max(lengths) == 2
        dropped = await complete_one(engine, prompts()[1], max_tokens=9, draft_min=5)
    assert off.tokens == short.tokens == dropped.tokens
    assert [each.timings and each.timings.drafted_tokens for each in (off, dropped)] == [0, 0]
    assert short.timings is not None
    assert short.timings.drafted_tokens > 0


async def test_a_shortest_draft_does_not_end_the_search_for_the_best_length(llama: Path) -> None:
    text = prompts()[2] * 3
    async with serving(speculating(llama, draft_max=8, draft_min=4)) as engine:
        drafter = work_of(engine)._backend.drafter
        assert drafter is not None
        assert drafter.length.lengths == (0, 4, 8)
        # A request whose own shortest or longest draft differs from the length on trial does not stop the trials.
        for changes in ({}, {"draft_min": 7}, {"draft_max": 2, "draft_min": 0}):
            drafter.length = DraftLength.up_to(8, 4)
            for _ in range(4):
                await complete_one(engine, text, max_tokens=NEW, sampling=replace(GREEDY, ignore_eos=True), **changes)
            measured = drafter.length._choice_for(1).measured
            assert measured[0].steps
            assert measured[4].steps


@pytest.mark.parametrize("error", [RuntimeError("wrong shape"), torch.OutOfMemoryError("out of memory")], ids=str)
async def test_answers_continue_without_drafts_where_the_draft_model_fails(
    llama: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(drafted_by(llama, llama)) as engine:
        model = drafter_of(engine)._model
        assert isinstance(model, DraftModel)
        forward, calls = model._runner.forward, 0

        def failing(*rest: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise error
            return forward(*rest)

        model._runner.forward = failing  # type: ignore[assignment, method-assign]
        found = await answers(engine, [generation(prompt, max_tokens=NEW) for prompt in prompts()])
        again = drafter_of(engine).drafted
        assert [choice.tokens for (choice,) in found] == [generated(reference(llama), each, NEW) for each in prompts()]
        await complete_one(engine, prompts()[1], max_tokens=NEW)
        # Memory may be free later. Any other failure would happen again.
        assert (drafter_of(engine).drafted > again) == isinstance(error, torch.OutOfMemoryError)
    assert "draft model" in caplog.text


async def test_rejected_tokens_with_keys_that_are_not_numbers_spoil_no_text(llama: Path) -> None:
    model = reference(llama)
    wanted = [generated(model, prompt, NEW) for prompt in prompts()]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), wanted, strict=True)]
    unused = min(set(range(2, 500)).difference(*texts))
    async with serving(speculating(llama)) as engine:
        runner = work_of(engine)._backend.runner
        assert isinstance(runner, PagedRunner)
        runner._model.get_input_embeddings().weight.data[unused] = float("inf")
        # The first token of each draft is right, and the keys of the others overflow.
        wrong = [[*text[: len(text) - NEW + end], *[unused] * 9] for text in texts for end in range(2, NEW, 2)]
        drafter = drafting(engine, Oracle(1.0, wrong), FixedLength(3))
        found = await answers(engine, [generation(prompt, max_tokens=NEW) for prompt in prompts()])
        assert bool(runner.pool._store.isfinite().all())
    assert [choice.tokens for (choice,) in found] == wanted
    assert drafter.drafted > 0


def test_the_draft_of_a_text_with_many_penalised_tokens_is_short() -> None:
    sequence = TokenSequence(
        1, 2000, list(range(2001)), limit=90, ends=frozenset(), draft_limits=DraftLimits(16), computed=2000
    )
    choice = RequestChoice(0, sequence, None, None, PenaltyCounts(sequence, -1))  # type: ignore[arg-type]  # not read
    lengths = []
    for _ in range(2):
        (segment,) = Drafter(ALWAYS, Oracle(0.0)).draft(
            (Segment(sequence, 0, 2000, 1, draft_room=16),), lambda sequence: choice
        )
        lengths.append(len(segment.drafted))
        assert choice.penalty_counts is not None
        choice.penalty_counts.update()
    assert lengths == [16, 2]


def test_a_draft_model_reads_and_drafts_beside_prompts_only_if_drafts_have_paid() -> None:
    class Journal(Oracle):
        calls = 0

        def draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> list[list[int]]:
            self.calls += 1
            return super().draft(batch, segments, saving)

    model, length = Journal(0.0), DraftLength.up_to(8)
    drafter = Drafter(length, model)
    sequence = TokenSequence(1, 8, list(range(8)), limit=90, ends=frozenset(), draft_limits=DraftLimits(8))
    prompt = (Segment(sequence, 0, 0, 8),)
    choice = RequestChoice(0, sequence, None, None, None)  # type: ignore[arg-type]  # not read
    seconds = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8}
    while (drafting := length.choose(1)) < 8:
        assert drafter.next_length(1, has_prompts=False) == drafting
        if not length.in_use(1):
            assert drafter.next_length(1, has_prompts=True) == 0
            drafter.draft(prompt, lambda sequence: choice)
            assert not model.calls
        length.learn(1, drafting, 1 + drafting, seconds[drafting])
    assert drafter.next_length(1, has_prompts=True) > 0
    drafter.draft(prompt, lambda sequence: choice)
    assert model.calls == 1


class Letters(Oracle):
    """Known texts, and letters that are mostly wrong."""

    def _one(self, segment: Segment) -> list[int]:
        return (
            super()._one(segment)
            if self.quality
            else [self._random.randrange(66, 92) for _ in range(segment.draft_room)]
        )


class AnswerMasks(WorkThread):
    """Computes masks of answers at once, and never those of drafts."""

    def __init__(self, work: GenerationLoop):
        super().__init__("grammar")
        self.work = work
        self.jobs: list[Job[Any]] = []

    def submit(self, function: Any) -> Job[Any]:
        job = Job(function)
        self.jobs.append(job)
        if any(choice.matcher is function.func.__self__ for choice in self.work._active):
            job.run()
        return job


@pytest.mark.parametrize(("quality", "late"), [(0.0, False), (1.0, True)], ids=["rejected", "late"])
async def test_drafts_and_their_late_masks_do_not_change_the_text_of_a_grammar(
    llama: Path, quality: float, late: bool
) -> None:
    request = generation(prompts()[1], max_tokens=NEW, grammar=Grammar("regex", "[a-z]{30}", "guided_regex"))
    async with serving(load(llama, ctx_size=CTX)) as engine:
        expected = await answers(engine, [request])
    texts = [[*request.prompt, *choice.tokens] for (choice,) in expected]
    async with serving(speculating(llama)) as engine:
        drafter = drafting(engine, Letters(quality, texts), FixedLength(16))
        masks = AnswerMasks(work_of(engine))
        if late:
            engine._grammars._mask_threads = (masks, masks)
        assert comparable(await answers(engine, [request])) == comparable(expected)
    assert all(job.future.done() for job in masks.jobs), "late ones were dropped"
    assert drafter.drafted > 50


@pytest.mark.parametrize("drafts", [False, True])
async def test_the_engine_ends_reasoning_after_its_budget(llama: Path, drafts: bool) -> None:
    special = {"<think>": 40, "</think>": 41}
    before = tools.preamble(find("</think>", None), is_open=True, special=special, budget=6)
    limit = replace(tools.any_text(40, is_open=True), preamble=before)
    plain, limited = (generation(prompts()[1], max_tokens=NEW, grammar=grammar) for grammar in (None, limit))
    async with serving(speculating(llama) if drafts else load(llama, ctx_size=CTX)) as engine:
        [[free]] = await answers(engine, [plain])
        if drafts:
            drafting(engine, Letters(0.9, [[*plain.prompt, *free.tokens]]), FixedLength(16))
        [[choice]] = await answers(engine, [limited])
    assert 41 not in free.tokens[:7], "the model does not end by itself"
    assert choice.tokens[:6] == free.tokens[:6]
    assert choice.tokens[6] == 41
    assert len(choice.tokens) == len(free.tokens), "any text follows"


# Draft models


def drafted_by(folder: Path, draft: Path, **changes: Any) -> TransformersEngine:
    engine = speculating(folder, **{"ngram_size": 0, "draft_snapshot": str(draft), **changes})
    drafter = work_of(engine)._backend.drafter
    assert drafter is not None
    drafter.length = ALWAYS
    return engine


def drafter_of(engine: TransformersEngine) -> Drafter:
    drafter = work_of(engine)._backend.drafter
    assert drafter is not None
    return drafter


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worse and smaller model with the same vocabulary, of another family."""
    return tiny.make("qwen3", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


async def test_a_draft_model_that_is_the_target_is_accepted_always(llama: Path) -> None:
    model = reference(llama)
    async with serving(drafted_by(llama, llama)) as engine:
        for _ in range(2):  # the second time behind a cached prefix
            found = await answers(engine, [generation(prompt, max_tokens=NEW) for prompt in prompts()])
            assert [choice.tokens for (choice,) in found] == [generated(model, prompt, NEW) for prompt in prompts()]
        drafter = drafter_of(engine)
        assert drafter.drafted > 100
        assert drafter.accepted == drafter.drafted
        assert drafter.accepted_at[0] == drafter.drafts


@pytest.mark.parametrize(
    ("is_target", "changes"),
    [(True, {"kv_tokens": 2 * CTX}), (False, {"kv_cache_dtype": "int8"})],
    ids=["target-in-a-small-pool", "other-with-int8"],
)
async def test_answers_with_a_draft_model_are_those_without(
    llama: Path, other: Path, is_target: bool, changes: dict[str, Any]
) -> None:
    async with serving(load(llama, ctx_size=CTX, parallel=4, prefill_chunk=16, **changes)) as engine:
        expected = await answers(engine, requests())
    async with serving(drafted_by(llama, llama if is_target else other, **changes)) as engine:
        for _ in range(2):
            assert comparable(await answers(engine, requests())) == comparable(expected)
        drafter = drafter_of(engine)
        assert drafter.drafted > 100
        if is_target:  # many of these requests sample
            assert drafter.accepted > 0.4 * drafter.drafted


async def test_adapters_on_the_target_keep_their_text_with_drafts(llama: Path, tmp_path: Path) -> None:
    adapters = [
        AdapterSource(name=name, path=str(lora.make(llama, tmp_path / name, seed=seed)))
        for seed, name in enumerate(("first", "second"))
    ]
    changes: dict[str, Any] = {"adapters": encode_adapters(adapters), "max_loras": 2}
    wanted = [
        generation(prompt, max_tokens=NEW, adapter=AdapterChoice(name) if name else None)
        for prompt in prompts()
        for name in ("", "first", "second")
    ]
    async with serving(load(llama, ctx_size=CTX, parallel=4, prefill_chunk=16, **changes)) as engine:
        expected = await answers(engine, wanted)
    assert len({tuple(choice.tokens) for (choice,) in expected}) == len(wanted), "adapters change the text"
    async with serving(drafted_by(llama, llama, **changes)) as engine:
        for _ in range(2):  # the second time with cached prefixes
            assert comparable(await answers(engine, wanted)) == comparable(expected)
        assert drafter_of(engine).accepted > 0


def merged(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a snapshot with another tokenizer.json."""
    shutil.copytree(source, target)
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return target


def test_a_draft_model_with_another_tokenizer_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        one, other = (next(token for token, number in vocab.items() if number == wanted) for wanted in (90, 91))
        vocab[one], vocab[other] = 91, 90

    draft = merged(llama, tmp_path / "draft", swap)
    with pytest.raises(StartError, match=f"model-draft = {draft}: its tokenizer is another one: token 90 is"):
        speculating(llama, draft_snapshot=str(draft))


def test_a_tokenizer_may_have_128_tokens_beyond_the_other() -> None:
    few, many, more = ({number: str(number) for number in range(count)} for count in (500, 628, 629))
    assert vocabulary_fault(few, many) == vocabulary_fault(many, few) == ""
    assert vocabulary_fault(few, more) == "its tokenizer has 629 tokens and not 500; name one of the same family"
    assert vocabulary_fault(more, few) == "its tokenizer has 500 tokens and not 629; name one of the same family"


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("llama", "mamba", "architecture 'mamba' cannot draft"),
        ("llama", "gemma2", "architecture 'gemma2' cannot draft"),
        ("mamba", "llama", "the model has states, and states cannot be taken back"),
        ("t5", "llama", "it is not for architecture 't5', which has an encoder"),
        ("zamba2", "llama", "architecture 'zamba2' was not tested with several tokens of a row"),
    ],
)
def test_a_pair_that_cannot_draft_is_refused_by_name(tmp_path: Path, target: str, draft: str, message: str) -> None:
    folders = [tiny.make(family, tmp_path / family) for family in (target, draft)]
    with pytest.raises(StartError, match=message):
        speculating(folders[0], draft_snapshot=str(folders[1]))


async def test_a_draft_model_drafts_up_to_its_own_longest_text(llama: Path, tmp_path: Path) -> None:
    draft = tiny.make("gpt2", tmp_path / "draft", n_positions=64)
    prompt = prompts()[2]
    async with serving(drafted_by(llama, draft)) as engine:
        found = await complete_one(engine, prompt, max_tokens=100)
        drafted = drafter_of(engine).drafted
    assert found.tokens == generated(reference(llama), prompt, 100)
    assert 0 < drafted <= 4 * (64 - len(prompt))


def read_lengths(drafter: Drafter) -> list[int]:
    """The number of tokens of each later step of the draft model; the list grows."""
    model = drafter._model
    assert isinstance(model, DraftModel)
    read: list[int] = []
    forward = model._runner.forward

    def journaled(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(len(tokens))
        return forward(tokens, *rest)

    model._runner.forward = journaled  # type: ignore[assignment, method-assign]
    return read


async def test_the_draft_model_announces_each_step_that_is_larger_than_all_before(llama: Path) -> None:
    async with serving(drafted_by(llama, llama)) as engine:
        model, read = drafter_of(engine)._model, read_lengths(drafter_of(engine))
        announced: list[int] = []  # the number of steps before each announcement
        assert model is not None
        model.on_larger_step = lambda: announced.append(len(read))
        for _ in range(2):
            await complete_one(engine, prompts()[0], max_tokens=NEW)
        assert announced[0] == 0, "before the first step"
        before, count = len(announced), len(read)
        await complete_one(engine, prompts()[0], max_tokens=NEW)
        assert len(announced) == before
        assert len(read) > count
        await answers(engine, [generation(prompt, max_tokens=NEW) for prompt in prompts()])
        assert len(announced) > before


@pytest.mark.parametrize(("token_seconds", "reads"), [(0.0, True), (1e6, False)], ids=["fast", "slow"])
async def test_the_draft_model_reads_only_what_takes_less_time_than_drafts_save(
    llama: Path, token_seconds: float, reads: bool
) -> None:
    async with serving(drafted_by(llama, llama, prefill_chunk=16)) as engine:
        drafter = drafter_of(engine)
        model = drafter._model
        assert isinstance(model, DraftModel)
        drafter.length = DraftLength.up_to(4)
        model._token_seconds.append(token_seconds)
        read = read_lengths(drafter)
        await complete_one(engine, prompts(60)[3], max_tokens=30)
        assert bool(read) == bool(drafter.drafted) == reads


async def test_drafts_begin_when_the_draft_model_has_read_all_sequences(llama: Path) -> None:
    found: list[list[int]] = []  # lengths of the drafts of each step
    async with serving(drafted_by(llama, llama, prefill_chunk=16)) as engine:
        drafter = drafter_of(engine)
        model = drafter._model
        assert isinstance(model, DraftModel)
        draft = model.draft

        def journaled(batch: Batch, segments: Sequence[Segment], saving: float) -> Sequence[Sequence[int]]:
            drafts = draft(batch, segments, saving)
            found.append([len(tokens) for tokens in drafts])
            return drafts

        model.draft = journaled  # type: ignore[method-assign]
        drafter.length = DraftLength.up_to(4)  # the first trial of a length begins after some steps without drafts
        await answers(engine, [generation(prompt, max_tokens=30) for prompt in prompts(60)])
    assert [0, 0, 0, 0] in found, "four prompts have more tokens than the draft model reads in one step"
    assert found.index([0, 0, 0, 0]) < found.index([1, 1, 1, 1])
    assert all(min(lengths) > 0 or max(lengths) == 0 for lengths in found if lengths)


async def test_the_draft_model_reads_a_cached_prefix_only_once(llama: Path) -> None:
    prompt = prompts(60)[3]
    async with serving(drafted_by(llama, llama, prefill_chunk=64)) as engine:
        read = read_lengths(drafter_of(engine))
        await complete_one(engine, prompt, max_tokens=10)
        assert max(read) >= 60
        read.clear()
        await complete_one(engine, prompt, max_tokens=10)
        assert max(read) <= 16
        # Blocks that another sequence of the target has used since then are not taken for those of the prompt.
        read.clear()
        await answers(engine, [generation([7 + number] * 100, max_tokens=20, draft_max=0) for number in range(12)])
        await complete_one(engine, prompt, max_tokens=10)
        assert max(read) >= 44


# Caches without blocks

# Of each way in which models that run by their own forward tell positions apart one.
ALIGNED = (
    "bart", "bloom", "cohere2", "deepseek_v2", "falcon", "gemma2", "gpt_neo", "gpt_oss", "gptj", "llama4_text", "t5"
)  # fmt: skip


@pytest.mark.parametrize("family", ALIGNED)
async def test_a_family_without_blocks_gives_the_tokens_of_generate_with_drafts(tmp_path: Path, family: str) -> None:
    snapshot = tiny.make(family, tmp_path / "m", **({"seed": 2} if family == "t5" else {}))
    model = reference(snapshot)
    asked = prompts(30)
    wanted = [generated(model, prompt, 24) for prompt in asked]
    texts = [[*prompt, *answer] for prompt, answer in zip(asked, wanted, strict=True)]
    async with serving(load(snapshot, ctx_size=96, parallel=3, prefill_chunk=16, ngram_size=2)) as engine:
        drafter = drafting(engine, Oracle(0.8, texts))
        found = await answers(engine, [generation(prompt, max_tokens=24) for prompt in asked])
    assert [choice.tokens for (choice,) in found] == wanted
    assert drafter.drafted > 0


@pytest.mark.parametrize("family", ["gemma2", "t5"])
async def test_every_kind_of_request_is_answered_alike_without_blocks(tmp_path: Path, family: str) -> None:
    snapshot = tiny.make(family, tmp_path / "m", **({"seed": 2} if family == "t5" else {}))
    kinds = requests(prompt_logprobs=family != "t5")
    async with serving(load(snapshot, ctx_size=CTX, parallel=4, prefill_chunk=16)) as engine:
        expected = await answers(engine, kinds)
    texts = [
        [*request.prompt, *choice.tokens] for request, found in zip(kinds, expected, strict=True) for choice in found
    ]
    async with serving(load(snapshot, ctx_size=CTX, parallel=4, prefill_chunk=16, ngram_size=2)) as engine:
        drafter = drafting(engine, Oracle(0.7, texts))
        assert comparable(await answers(engine, kinds)) == comparable(expected)
        assert drafter.accepted > 0


@pytest.mark.parametrize("family", ["bloom", "deepseek_v2", "gemma2"])
async def test_answers_without_blocks_are_the_same_with_a_draft_model(tmp_path: Path, llama: Path, family: str) -> None:
    snapshot, kinds = tiny.make(family, tmp_path / "m"), requests()
    async with serving(load(snapshot, ctx_size=CTX, parallel=4, prefill_chunk=16)) as engine:
        expected = await answers(engine, kinds)
    async with serving(drafted_by(snapshot, llama)) as engine:
        assert comparable(await answers(engine, kinds)) == comparable(expected)
        assert drafter_of(engine).drafted > 100


async def test_a_draft_model_without_blocks_that_is_the_target_is_accepted_always(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = shutil.copytree(llama, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))  # has no effect: a mark
    backend = architectures.backend
    monkeypatch.setattr(
        architectures, "backend", lambda config: backend(config) if config.initializer_range == 0.5 else "aligned"
    )
    model = reference(llama)
    # More sequences than rows. Each row has several in turn, and some begin like the one before.
    asked = [*prompts(), *prompts(40), *prompts()]
    async with serving(drafted_by(llama, draft)) as engine:
        assert isinstance(work_of(engine)._backend.runner, AlignedRunner)
        read = read_lengths(drafter_of(engine))
        found = await answers(engine, [generation(prompt, max_tokens=NEW) for prompt in asked])
        assert [choice.tokens for (choice,) in found] == [generated(model, prompt, NEW) for prompt in asked]
        assert drafter_of(engine).drafted > 100
        assert drafter_of(engine).accepted == drafter_of(engine).drafted
        several = await answers(engine, [generation(asked[0], max_tokens=NEW, n=3)])
        assert [choice.tokens for choice in several[0]] == [generated(model, asked[0], NEW)] * 3
        assert drafter_of(engine).accepted == drafter_of(engine).drafted
        await complete_one(engine, prompts(60)[3], max_tokens=10)
        read.clear()
        await complete_one(engine, prompts(60)[3], max_tokens=10)
        assert max(read) <= 16, "the row has the prompt already"


async def test_a_model_with_states_is_served_without_drafts_and_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = tiny.make("mamba", tmp_path / "m")
    async with serving(load(snapshot, ctx_size=CTX, ngram_size=2)) as engine:
        assert work_of(engine)._backend.drafter is None
        found = await complete_one(engine, prompts()[1] * 3, max_tokens=NEW)
    assert found.tokens == generated(reference(snapshot), prompts()[1] * 3, NEW)
    assert "no speculative decoding for architecture 'mamba': states cannot be taken back" in caplog.text
