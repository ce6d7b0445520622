"""Grammars: complete texts are of the language, and other requests are not affected."""

import asyncio
import contextlib
import json
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests import tiny
from tests.worker.fake_engine import FakeEngine
from tests.worker.loaded import (
    DEADLINE,
    GREEDY,
    CollectedChoice,
    LateThread,
    collect_choices,
    complete_one,
    generated,
    generation,
    load,
    serving,
    work_of,
)
from tests.worker.serving import options
from tests.worker.stepped import journaled
from worker.api.served_model import ServedModel
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.sample.grammar import (
    COMPILE_SECONDS,
    COMPILING_BYTES,
    DETACH_SECONDS,
    KEPT_SECONDS,
    LARGE_COMPILING_BYTES,
    LONG_TEXT,
    MASK_SECONDS,
    MAX_COMPILED,
    MAX_DETACHED,
    REST_FACTOR,
    SLOW_SECONDS,
    GrammarMatcher,
    Grammars,
)
from worker.engines.transformers.sample.sampler import RowSampling, TokenMasks, mask_bias, sample
from worker.engines.transformers.sample.work_thread import Clock, Job, WorkThread
from worker.engines.transformers.schedule.scheduler import Batch
from worker.errors import InvalidValue, SequenceFailed, StartError, UnsupportedByModel
from worker.interface import Grammar, SamplingParams
from worker.prompt import tools
from worker.prompt.chat_formats import ChatFormat, find
from worker.prompt.response_parser import AnswerParser, ParseOptions, call_syntax
from worker.prompt.tools import any_text, opening_token, preamble
from worker.protocol.events import Exit
from worker.server.server import Server

CTX, EOS = 256, 1
PROMPT = (9, 41, 70, 77, 80)
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y", None]}}, "required": ["b"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 4}, "minItems": 2, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -3, "maximum": 12.5}, {"const": "nothing"}]},
    {"type": "string", "pattern": "^[A-F]{2}-[0-9]{1,3}$"},
    {"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "leaf": {"type": "boolean"}},
                        "required": ["leaf"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}, "n": {"type": ["integer", "null"]}},
     "required": ["when", "n"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"kind": {"const": "é 🦊"}, "list": {"type": "array", "maxItems": 2,
     "items": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 3, "exclusiveMaximum": 40}},
               "required": ["id"], "additionalProperties": False}}}, "required": ["kind", "list"]},
]  # fmt: skip


def schema(value: Any, **further: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value), "response_format", **further)


def warm(seed: int, **further: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, **further)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[TransformersEngine]:
    made = load(llama, ctx_size=CTX, parallel=16, queue_size=1000)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(llama)
    return loaded.eval()


@pytest.mark.slow
async def test_every_answer_that_ends_satisfies_its_schema(engine: TransformersEngine) -> None:
    validators = pytest.importorskip("jsonschema", reason="a validator that is not ours")
    asked = [(index % len(SCHEMAS), index) for index in range(310)]  # 250 of them end by themselves
    answers: list[CollectedChoice] = []
    for begin in range(0, len(asked), 62):  # in parts: each request has a deadline
        answers += await asyncio.gather(
            *(
                complete_one(engine, PROMPT, grammar=schema(SCHEMAS[kind]), max_tokens=150, sampling=warm(seed))
                for kind, seed in asked[begin : begin + 62]
            )
        )
    ended: Counter[int] = Counter()
    for (kind, _), collected in zip(asked, answers, strict=True):
        if collected.finish == "stop":
            ended[kind] += 1
            validators.validate(
                json.loads(collected.text), SCHEMAS[kind], format_checker=validators.FormatChecker(["date"])
            )
    assert ended.total() >= 250, ended
    assert all(ended[kind] >= 10 for kind in range(len(SCHEMAS))), ended


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"(ab|c){2,5}[0-9]"), r"(ab|c){2,5}[0-9]"),
        (Grammar("regex", "^[a-c]{3}$"), "[a-c]{3}"),
        (Grammar("choice", json.dumps(["ja", 'a "b"', "two\nlines", "🦊\\"])), r'ja|a "b"|two\nlines|🦊\\'),
        (Grammar("lark", 'start: "(" start ")" | /[xy]/'), r"\(*[xy]\)*"),
        (Grammar("gbnf", 'root ::= ("yes" | "no") " " digit+ "."\ndigit ::= [0-9]'), r"(yes|no) [0-9]+\."),
        (Grammar("gbnf", r'root ::= "\u00e9" [\u0041-\u0043] "\U0001F98A\\u"'), r"é[A-C]🦊\\u"),
        (Grammar("gbnf", 'root ::= start\nstart ::= [a-b&&~~]{3} # start'), "[ab&~]{3}"),
        (Grammar("gbnf", 'root ::= ([a-b]{2}) {2} (")"+ )? (x?)* "."\nx ::= ("c"{2}){1,2}'), r"[ab]{4}\)*(cc)*\."),
        (schema({"type": "object"}), r"\{(?s:.*)\}"),
    ],
)  # fmt: skip
async def test_an_answer_is_a_text_of_its_language(engine: TransformersEngine, grammar: Grammar, pattern: str) -> None:
    collected = await collect_choices(
        engine, generation(PROMPT, grammar=grammar, max_tokens=200, n=6, sampling=warm(5))
    )
    for each in collected:
        assert re.fullmatch(pattern, each.text) or each.finish == "length", each.text
    assert any(each.finish == "stop" for each in collected)


async def test_a_grammar_does_not_change_other_sequences(engine: TransformersEngine, model: Any) -> None:
    prompts = [(20 + index, 5, 6) for index in range(6)]
    constrained = [
        asyncio.create_task(
            complete_one(engine, PROMPT, grammar=schema(SCHEMAS[0]), max_tokens=60, sampling=warm(seed))
        )
        for seed in range(8)
    ]
    collected = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=24) for prompt in prompts))
    assert [each.tokens for each in collected] == [generated(model, prompt, 24) for prompt in prompts]
    alone = await complete_one(engine, PROMPT, grammar=schema(SCHEMAS[0]), max_tokens=60, sampling=warm(3))
    assert alone.text == (await constrained[3]).text, "the same seed, the same text, whatever else is in the batch"
    await asyncio.gather(*constrained)


async def test_a_preset_whose_grammar_cannot_be_compiled_is_not_served(engine: TransformersEngine) -> None:
    for members in ('{"grammar": "root ::= missing"}', '{"json-schema": {"type": "objekt"}}'):
        server = Server(engine, engine.tokenizer, options(sampling=members), token=None, announce=lambda event: None)
        with pytest.raises(StartError, match=r"sampling: (grammar|json_schema)") as error:
            await server.start()
        assert error.value.exit is Exit.USAGE


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "objekt"}),
        schema({"type": "string", "not": {"const": "a"}}),
        schema({"$ref": "#/nowhere"}),
        Grammar("json_schema", "[]", "response_format"),
        Grammar("json_schema", "{", "response_format"),
        Grammar("regex", "(a", "response_format"),
        Grammar("regex", "a(?=b)", "response_format"),
        Grammar("lark", "start: missing", "response_format"),
        Grammar("gbnf", "root ::= missing", "response_format"),
        Grammar("gbnf", "no grammar at all", "response_format"),
        Grammar("gbnf", "root ::= " + "(" * 5000, "response_format"),
        Grammar("choice", "a", "response_format"),
        Grammar("regex", "a" * 300_000, "response_format"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_by_its_field_and_nothing_is_queued(
    engine: TransformersEngine, model: Any, grammar: Grammar
) -> None:
    neighbour = asyncio.create_task(complete_one(engine, PROMPT, max_tokens=16))
    with pytest.raises(InvalidValue, match="response_format") as caught:
        await complete_one(engine, PROMPT, grammar=grammar, max_tokens=16)
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 400
    assert (await neighbour).tokens == generated(model, PROMPT, 16)
    assert engine.occupancy.waiting == 0


@pytest.mark.parametrize(
    ("grammar", "remedy"),
    [
        (
            Grammar("gbnf", "root ::= root", "grammar"),
            "it matches no text: give each rule an alternative without itself",
        ),
        (Grammar("regex", r"[^\s\S]", "guided_regex"), "it matches no text"),
        (schema({"$ref": "#"}), "it matches no text"),
        (Grammar("gbnf", " ", "grammar"), "it has no rule named root; begin it with root ::="),
        (Grammar("lark", "%llguidance {}", "grammar"), "it has no rule named start; begin it with start:"),
        (Grammar("regex", "a\\", "guided_regex"), "it ends with a backslash that escapes nothing"),
        (Grammar("gbnf", "root ::= a", "grammar"), "Rule 'a' not found"),
    ],
)
def test_the_message_for_a_grammar_names_its_fault(grammar: Grammar, remedy: str) -> None:
    grammars = Grammars(tiny.make_tokenizer(), ends={EOS}, vocab_size=256)
    with pytest.raises(InvalidValue) as caught:
        grammars.matcher(grammar)
    assert caught.value.message.startswith(f"{grammar.field} cannot be compiled: {remedy}")


async def test_a_lenient_schema_ignores_unsupported_keywords_only(engine: TransformersEngine) -> None:
    asked = {"type": "string", "maxLength": 3, "not": {"const": "a"}}
    collected = await complete_one(engine, PROMPT, grammar=schema(asked, lenient=True), max_tokens=60, sampling=warm(1))
    assert len(json.loads(collected.text)) <= 3


async def test_the_end_of_a_grammar_ends_the_answer_despite_ignore_eos(engine: TransformersEngine) -> None:
    three = Grammar("regex", "[ab]{3}")
    for sampling in (GREEDY, warm(1, min_tokens=50), warm(2, ignore_eos=True)):
        collected = await complete_one(engine, PROMPT, grammar=three, max_tokens=60, sampling=sampling)
        assert (collected.finish, len(collected.text), len(collected.tokens)) == ("stop", 3, 3)
    last = await complete_one(engine, PROMPT, grammar=three, max_tokens=3)
    assert last.finish == "stop", "complete with its last token is complete"
    open_end = Grammar("lark", "start: /[ab]{3}/ c?\nc: <[0]>")  # after three letters an end or one special token
    collected = await complete_one(engine, PROMPT, grammar=open_end, max_tokens=60, sampling=warm(3, min_tokens=40))
    assert (collected.finish, len(collected.text)) == ("stop", 3)


async def test_minimum_and_ignored_ends_hold_inside_a_grammar(engine: TransformersEngine) -> None:
    many = Grammar("regex", "[ab]+")
    collected = await complete_one(engine, PROMPT, grammar=many, max_tokens=30, sampling=warm(1, min_tokens=30))
    assert (collected.finish, len(collected.text)) == ("length", 30)
    collected = await complete_one(engine, PROMPT, grammar=many, max_tokens=30, sampling=warm(1, ignore_eos=True))
    assert (collected.finish, len(collected.text)) == ("length", 30)
    short = await complete_one(engine, PROMPT, grammar=many, max_tokens=30, sampling=warm(1, logit_bias={EOS: 100.0}))
    assert (short.finish, len(short.text)) == ("stop", 1)


async def test_the_error_of_a_grammar_that_must_repeat_itself_names_the_setting(engine: TransformersEngine) -> None:
    once = replace(GREEDY, no_repeat_ngram_size=1)
    with pytest.raises(SequenceFailed, match="would repeat 1 tokens; set no_repeat_ngram_size to 0"):
        await complete_one(engine, PROMPT, grammar=Grammar("regex", "[ab]{9}"), max_tokens=30, sampling=once)


async def test_logprobs_are_of_the_distribution_without_the_grammar(engine: TransformersEngine) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    free = await complete_one(engine, PROMPT, max_tokens=1, sampling=sampling)
    held = await complete_one(engine, PROMPT, grammar=Grammar("choice", '["a", "b"]'), max_tokens=1, sampling=sampling)
    assert held.logprobs[0].top == free.logprobs[0].top
    assert held.tokens[0] not in {each.token for each in free.logprobs[0].top}
    assert held.logprobs[0].logprob is not None
    assert held.logprobs[0].logprob < (free.logprobs[0].top[-1].logprob or 0.0)


async def test_a_stop_string_ends_an_answer_inside_its_grammar(engine: TransformersEngine) -> None:
    collected = await complete_one(
        engine, PROMPT, grammar=Grammar("regex", "[ab]{4}STOP[ab]{400}"), stop=("STOP",), max_tokens=50
    )
    assert (collected.finish, collected.stop, len(collected.text)) == ("stop", "STOP", 4)


async def test_a_preempted_sequence_goes_on_in_its_grammar_where_it_was(llama: Path) -> None:
    failures: list[Batch] = []

    def fault(batch: Batch, ahead: bool) -> None:
        """No memory for a third sequence once all have begun to answer."""
        if len(batch) > 2 and min(segment.sequence.output_tokens for segment in batch) >= 2:
            failures.append(batch)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    async def answer_all(engine: TransformersEngine) -> list[str]:
        asked = (
            complete_one(engine, PROMPT, grammar=schema(SCHEMAS[6]), max_tokens=150, sampling=warm(seed))
            for seed in range(3)
        )
        return [collected.text for collected in await asyncio.gather(*asked)]

    tight, _ = journaled(llama, fault, ctx_size=CTX, parallel=3)
    async with serving(tight):
        preempted = await answer_all(tight)
    assert failures
    async with serving(load(llama, ctx_size=CTX, parallel=3)) as wide:
        assert await answer_all(wide) == preempted


async def test_a_grammar_may_ask_for_a_special_token_and_its_text_is_shown_where_wanted(
    engine: TransformersEngine,
) -> None:
    marked = Grammar("lark", 'start: <[0]> "x" <[0]> "y"')
    assert (await complete_one(engine, PROMPT, grammar=marked)).text == "xy"
    assert (
        await complete_one(engine, PROMPT, grammar=marked, visible_special_tokens=frozenset({0}))
    ).text == "<s>x<s>y"


@pytest.mark.slow
async def test_a_grammar_that_takes_long_to_compile_holds_up_no_step(engine: TransformersEngine, model: Any) -> None:
    release = threading.Event()
    engine._grammars._compilers[0].submit(release.wait)
    slow = asyncio.create_task(complete_one(engine, PROMPT, grammar=Grammar("regex", "[ab]{30}"), max_tokens=3))
    collected = await complete_one(engine, PROMPT, max_tokens=12)
    assert collected.tokens == generated(model, PROMPT, 12)
    assert not slow.done()
    release.set()
    assert (await slow).finish == "length"


BOMB = Grammar("gbnf", 'root ::= s\ns ::= s s | s s s | s s s s s s | s s s s s s s s | [a-z ] | ""', "ebnf")


async def test_an_answer_beside_a_grammar_bomb_is_complete_and_the_bomb_ends_alone(
    engine: TransformersEngine, model: Any
) -> None:
    """Each mask of the bomb takes longer than the one before; the 12th would take a quarter of a second."""
    others = set(threading.enumerate()) - {each._thread for each in engine._grammars._mask_threads}
    [long] = engine.tokenizer.encode(" worker", add_special_tokens=False)
    always = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias={long: 100.0})
    bomb = complete_one(engine, PROMPT, grammar=BOMB, max_tokens=200, sampling=always)
    held = complete_one(engine, PROMPT, grammar=Grammar("regex", "[ab]{30}"), max_tokens=40, sampling=warm(2))
    failed, free, short = await asyncio.gather(
        bomb, complete_one(engine, PROMPT, max_tokens=60), held, return_exceptions=True
    )
    assert isinstance(failed, InvalidValue)
    assert (failed.status, failed.param) == (400, "ebnf")
    assert failed.message.startswith("ebnf is too complex")
    assert isinstance(free, CollectedChoice)
    assert free.tokens == generated(model, PROMPT, 60)
    assert isinstance(short, CollectedChoice)
    assert re.fullmatch("[ab]{30}", short.text)
    # Its last mask is still computed, in which this process must not end. A worker ends without Python's shutdown.
    for thread in set(threading.enumerate()) - others - {each._thread for each in engine._grammars._mask_threads}:
        if thread.name in ("grammar", "grammar-slow"):
            thread.join(DEADLINE)


def test_a_mask_that_takes_too_long_fails_and_those_behind_it_are_computed() -> None:
    grammars = CountedGrammars(CountedClock(), 0.0)
    slow, usual = (grammars.matcher(Grammar("regex", "[ab]*", "ebnf")) for _ in range(2))
    grammars.begun.get(timeout=DEADLINE)
    for matcher in (slow, usual):
        matcher.take(66)
    slow.mask = grammars._mask_threads[0].submit(grammars.spin)
    grammars.begun.get(timeout=DEADLINE)
    mask = grammars.mask(usual)
    assert grammars.is_late(slow)
    assert not mask.future.done()
    grammars.clock.seconds += SLOW_SECONDS + 0.001
    assert grammars.is_late(slow), "it is detached and goes on"
    assert mask.future.result(DEADLINE).any()
    assert not grammars.is_late(usual)
    grammars.clock.seconds += MASK_SECONDS
    with pytest.raises(InvalidValue, match=r"^ebnf is too complex: choosing a token takes too long"):
        grammars.is_late(slow)
    grammars.released.set()
    grammars.close()


def test_masks_of_slow_grammars_do_not_delay_usual_ones_nor_do_their_tokens_delay_the_caller(
    grammars: Grammars,
) -> None:
    slow, usual = grammars.matcher(Grammar("regex", "ab")), grammars.matcher(Grammar("regex", "(ab)"))
    expected = usual.of_choice()
    assert slow.allowed([66, 67]) == 2
    for token in (66, 67):
        release = threading.Event()
        grammars._mask_threads[1].submit(release.wait)
        slow.is_slow = True
        slow.lexer.slow.add(slow)
        assert slow.allowed([token]) == 0, "nothing is drafted"
        slow.take(token)
        assert not slow.is_over, "it has not taken the token"
        usual.take(token)
        expected.take(token)
        late = grammars.mask(slow)
        assert grammars.mask(usual).future.result(DEADLINE).any()
        assert not late.future.done()
        release.set()
        assert np.array_equal(late.future.result(DEADLINE), expected.next_mask(grammars.mask_bytes))
    assert slow.is_over


def test_a_request_does_not_wait_for_a_mask_of_another_one_with_the_same_grammar(grammars: Grammars) -> None:
    """llguidance would wait, with the interpreter lock."""
    first, second, usual = (grammars.matcher(Grammar("regex", regex)) for regex in ("abc", "abc", "(abc)"))
    expected = usual.of_choice()
    with first.lexer.lock:  # held while a mask is computed
        assert second.allowed([66]) == 0
        assert second.after_each([66]) == []
        second.take(66)
        second.take(67)
    for token in (66, 67):
        expected.take(token)
    first.lexer.slow.add(first)
    release = threading.Event()
    grammars._mask_threads[1].submit(release.wait)
    assert grammars.mask(usual).future.result(DEADLINE).any()
    mask = grammars.mask(second)
    assert not mask.future.done(), "it is computed behind the slow one"
    release.set()
    assert np.array_equal(mask.future.result(DEADLINE), expected.next_mask(grammars.mask_bytes))


@pytest.mark.parametrize("is_known_slow", [False, True])
def test_masks_do_not_wait_behind_one_that_waits_for_a_mask_of_its_grammar(
    is_known_slow: bool, grammars: Grammars
) -> None:
    first, second, other = (grammars.matcher(Grammar("regex", regex)) for regex in ("abc", "abc", "(abc)"))
    for matcher in (first, second, other):
        matcher.take(66)
        if is_known_slow:
            matcher.lexer.slow.add(matcher)
    with first.lexer.lock:  # held while a mask is computed
        waiting = grammars.mask(second)
        mask = grammars.mask(other).future.result(DEADLINE)
        assert not waiting.future.done()
    assert np.array_equal(waiting.future.result(DEADLINE), mask)


def test_the_last_token_of_a_slow_grammar_follows_those_that_it_has_not_taken(grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab"))
    matcher.is_slow = True
    assert not matcher.take(66)  # both are accepted tokens of one draft
    assert not matcher.take(67)
    grammars.mask(matcher).future.result(DEADLINE)
    assert matcher.is_over


class SlowThread(WorkThread):
    """Computes masks at once, and all of them are slow."""

    def submit(self, function: Any) -> Job[Any]:
        def compute() -> Any:
            found = function()
            function.func.__self__.is_slow = True
            return found

        job = Job(compute)
        job.run()
        return job


async def test_a_slow_grammar_ends_its_answer_as_a_usual_one(llama: Path) -> None:
    async with serving(load(llama, ctx_size=CTX)) as engine:
        engine._grammars._mask_threads = (SlowThread("slow"),) * 2
        for most in (3, 60):
            collected = await complete_one(engine, PROMPT, grammar=Grammar("regex", "[ab]{3}"), max_tokens=most)
            assert (collected.finish, len(collected.text), len(collected.tokens)) == ("stop", 3, 3)
            assert not collected.deltas[-1].hidden_tokens


class LateSlowThread(LateThread):
    """Computes a mask whenever the test says so, and all of them are slow."""

    ran = 0

    def submit(self, function: Any) -> Job[Any]:
        def compute() -> Any:
            found = function()
            function.func.__self__.is_slow = True
            self.ran += 1
            return found

        return super().submit(compute)


@pytest.mark.parametrize("is_preempted", [False, True])
@pytest.mark.parametrize(("most", "finish"), [(3, "stop"), (2, "length")])
async def test_no_step_waits_until_a_slow_grammar_has_taken_the_last_token(
    most: int, finish: str, is_preempted: bool, llama: Path
) -> None:
    free = generation(PROMPT[:3], max_tokens=60, sampling=replace(GREEDY, ignore_eos=True))
    async with serving(load(llama, ctx_size=CTX, parallel=4)) as engine:
        late, work = LateSlowThread(), work_of(engine)
        engine._grammars._mask_threads = (late, late)
        grammar = Grammar("regex", "[ab]{3}")
        asked = asyncio.create_task(complete_one(engine, PROMPT, grammar=grammar, max_tokens=most))
        while late.ran < most - 1:
            late.run_one()
            await asyncio.sleep(0)
        neighbour = CollectedChoice()
        async for delta in engine.generate(free):
            neighbour.add(delta)
            if is_preempted and len(neighbour.tokens) == 20:
                engine._loop.post(lambda: work._scheduler.preempt(work._scheduler.places[0][1]))
        assert len(neighbour.tokens) == 60
        assert not asked.done(), "its last token is not taken"
        while not asked.done():
            late.run_one()
            await asyncio.sleep(0)
        collected = await asked
        assert (collected.finish, len(collected.text), len(collected.tokens)) == (finish, most, most)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("family", "ngram_size"), [("llama", 0), ("llama", 2), ("gemma3_text", 0), ("mamba", 0), ("t5", 0)]
)
async def test_a_late_mask_delays_only_its_own_answer_and_changes_no_text(
    family: str, ngram_size: int, ahead: bool, tmp_path: Path
) -> None:
    held = {"grammar": Grammar("regex", "[a-z ]{12}[0-9]{4}"), "max_tokens": 30}
    free = generation(PROMPT[:3], max_tokens=60, sampling=replace(GREEDY, ignore_eos=True))
    folder, changes = tiny.make(family, tmp_path), {"ctx_size": CTX, "parallel": 4, "ngram_size": ngram_size}
    async with serving(load(folder, ahead=ahead, **changes)) as engine:
        asked = [held, {**held, "sampling": warm(4)}]
        expected = [await complete_one(engine, PROMPT, **each) for each in asked]
        [alone] = await collect_choices(engine, free)
        late = LateThread()
        engine._grammars._mask_threads = (late, late)
        tasks = [asyncio.create_task(complete_one(engine, PROMPT, **each)) for each in asked]
        neighbour = CollectedChoice()
        async for delta in engine.generate(free):
            neighbour.add(delta)
            if len(neighbour.tokens) == 30:
                assert not any(task.done() for task in tasks)
            if len(neighbour.tokens) >= 30:
                late.run_one()
        assert neighbour.tokens == alone.tokens
        while not all(task.done() for task in tasks):
            late.run_one()
            await asyncio.sleep(0)
        assert [(await task).tokens for task in tasks] == [each.tokens for each in expected]


def optional(count: int) -> str:
    return "root ::= " + " ".join(f'"{number:x}"?' for number in range(count))


def test_a_grammar_that_is_too_large_is_rejected_without_the_text_of_a_panic(grammars: Grammars) -> None:
    with pytest.raises(InvalidValue, match=r"^ebnf cannot be compiled: ") as failure:
        grammars.matcher(Grammar("gbnf", optional(33_000), "ebnf"))
    assert "panic" not in failure.value.message
    assert "backtrace" not in failure.value.message
    with pytest.raises(InvalidValue, match="at most"):
        grammars.matcher(Grammar("gbnf", "#" * (1 << 19), "ebnf"))


def test_a_grammar_with_too_many_alternatives_is_an_error_of_the_request(grammars: Grammars) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    matcher = grammars.matcher(Grammar("gbnf", "root ::= " + " | ".join(f'"a{i}"' for i in range(5000)), "ebnf"))
    [first, *_] = tokenizer.encode("a4", add_special_tokens=False)
    with pytest.raises(InvalidValue, match=r"ebnf is too complex: .* max is 2000"):
        matcher.take(first)


async def test_long_grammars_do_not_delay_short_ones_and_a_departed_client_delays_nobody(grammars: Grammars) -> None:
    release = threading.Event()
    grammars._compilers[1].submit(release.wait)  # a long grammar that is compiled
    long = asyncio.create_task(grammars.compiled(Grammar("gbnf", optional(1300), "ebnf")))
    departed = asyncio.create_task(grammars.compiled(Grammar("gbnf", optional(1400), "ebnf")))
    assert (await grammars.compiled(Grammar("regex", "a"))).failure == ""
    assert not long.done()
    departed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await departed
    release.set()
    assert (await long).failure == ""
    assert Grammar("gbnf", optional(1400), "ebnf") not in grammars._compiled


async def test_a_grammar_that_takes_too_long_to_compile_is_given_up_and_its_error_is_kept() -> None:
    grammars = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512, compile_seconds=-1.0)
    release = threading.Event()
    heavy = Grammar("regex", "(a{1000}){500}", "regex")
    grammars._compilers[0].submit(release.wait)
    waiting = asyncio.create_task(grammars.compiled(heavy))
    with pytest.raises(InvalidValue, match="regex cannot be compiled: it takes more than"):
        await waiting
    with pytest.raises(InvalidValue, match="guided_regex cannot be compiled: it takes more than") as kept:
        grammars.matcher(replace(heavy, field="guided_regex"))
    assert kept.value.param == "guided_regex"
    release.set()
    grammars.close()


def test_a_slow_grammar_takes_a_token_on_another_thread_and_not_under_the_interpreter_lock(grammars: Grammars) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    slow, usual = grammars.matcher(BOMB), grammars.matcher(BOMB)
    token = tokenizer.encode(" worker", add_special_tokens=False)[-1]
    for _ in range(6):
        for matcher in (slow, usual):
            matcher.is_slow = False
            matcher.take(token)
            matcher.next_mask(grammars.mask_bytes)
    slow.is_slow, usual.is_slow = True, False
    seconds = []
    for matcher in (slow, usual):
        begin = time.thread_time()
        matcher.take(token)
        matcher._take_all()
        seconds.append(time.thread_time() - begin)
    assert seconds[0] < seconds[1] / 4, "the CPU time of this thread"
    assert np.array_equal(slow.next_mask(grammars.mask_bytes), usual.next_mask(grammars.mask_bytes))


REFERENCES = {
    f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}} for number in range(1500)
}
SCHEMA = {"$ref": "#/$defs/d0", "$defs": {**REFERENCES, "d1500": {"type": "string"}}}
TERMINALS = "".join(f"T{number}: T{number + 1}?\n" for number in range(6000))


@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", json.dumps(SCHEMA)), Grammar("lark", f'start: T0\n{TERMINALS}T6000: "z"')]
)
async def test_rules_that_refer_to_each_other_in_a_long_chain_do_not_end_the_process(
    grammar: Grammar, grammars: Grammars
) -> None:
    matcher = await grammars.compiled(grammar)
    assert grammars.mask(matcher).future.result(DEADLINE).any()


class CountedClock:
    """A clock of CPU time that is moved by tests, the same for all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> Clock:
        return lambda: self.seconds


class CountedGrammars(Grammars):
    """Grammars that take some time of a clock to compile. A grammar of the text "slow..." does not end before
    `released`."""

    def __init__(self, clock: CountedClock, seconds: float):
        super().__init__(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512, clock_of_thread=clock)
        self.clock, self.seconds = clock, seconds
        self.released = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()

    def spin(self) -> Any:
        """A mask that takes long."""
        self.begun.put("mask")
        self.released.wait(DEADLINE)

    def _build(self) -> Any:
        self.clock.seconds += 9 * KEPT_SECONDS
        return super()._build()

    def _compile(self, grammar: Grammar, environment: Any) -> GrammarMatcher:
        self.clock.seconds += self.seconds
        self.begun.put(grammar.text)
        if grammar.text.startswith("slow"):
            self.released.wait(DEADLINE)
        return super()._compile(grammar, environment)


async def test_a_slow_compilation_is_detached_and_the_grammars_behind_it_go_on() -> None:
    grammars = CountedGrammars(CountedClock(), DETACH_SECONDS + 0.01)
    slow = asyncio.create_task(grammars.compiled(Grammar("regex", "slow")))
    await asyncio.to_thread(grammars.begun.get, timeout=DEADLINE)
    assert (await grammars.compiled(Grammar("regex", "a"))).failure == ""
    assert not slow.done()
    grammars.released.set()
    assert (await slow).failure == "", "it goes on"
    grammars.close()


async def test_few_slow_compilations_run_detached_even_if_their_clients_disconnect() -> None:
    grammars = CountedGrammars(CountedClock(), DETACH_SECONDS + 0.01)
    for number in range(MAX_DETACHED + 1):
        slow = asyncio.create_task(grammars.compiled(Grammar("regex", f"slow{number}")))
        await asyncio.to_thread(grammars.begun.get, timeout=DEADLINE)
        slow.cancel()
    short = asyncio.create_task(grammars.compiled(Grammar("regex", "a")))
    assert not (await asyncio.wait({short}, timeout=0.2))[0], "too many are detached"
    grammars.clock.seconds += COMPILE_SECONDS
    assert (await short).failure == "", "the slow one has exceeded its time"
    grammars.released.set()
    grammars.close()


def test_compiled_grammars_that_took_long_are_kept_for_a_limited_time_together() -> None:
    grammars = CountedGrammars(CountedClock(), 0.4 * KEPT_SECONDS)
    for text in ("a", "b", "a", "c", "b", "a"):
        grammars.matcher(Grammar("regex", text))
    assert list(grammars.begun.queue) == ["a", "b", "c", "b", "a"], "two of them fit, whatever the tables take"
    for text in ("(", "(", "b", "a"):
        with contextlib.suppress(InvalidValue):
            grammars.matcher(Grammar("regex", text))
    assert list(grammars.begun.queue)[5:] == ["("], "an error takes no memory"
    grammars.seconds = 9 * KEPT_SECONDS
    for text in ("d", "d"):
        grammars.matcher(Grammar("regex", text))
    assert list(grammars.begun.queue)[6:] == ["d"], "the last one is kept in any case"


def test_the_memory_of_large_regular_expressions_does_not_add_up(grammars: Grammars) -> None:
    grammars.matcher(Grammar("regex", "a"))
    memory.give_back()
    before = memory.resident()
    for count in range(60, 72):  # 20 MiB each
        grammars.matcher(Grammar("regex", f"(a{{1000}}){{{count}}}"))
    # CPU time bounds the memory, so a processor that is twice as fast keeps twice as much.
    assert memory.resident() - before < 140 << 20


def test_the_memory_of_a_compilation_is_announced_before_it_begins() -> None:
    announced: list[int] = []
    growth = Growth(lambda: announced.append(growth.bytes))
    grammars = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512, growth=growth)
    tables = grammars.bytes_to_come
    for text in ("a", "b", "a"):
        grammars.matcher(Grammar("regex", text))
    with pytest.raises(InvalidValue):
        grammars.matcher(Grammar("regex", "("))
    assert announced == [COMPILING_BYTES + tables, COMPILING_BYTES, COMPILING_BYTES], "the tables are built once"
    for text in ("a{9}", "a" * (LONG_TEXT + 1)):
        grammars.matcher(Grammar("regex", text))
    assert announced[3:] == [LARGE_COMPILING_BYTES] * 2
    assert growth.bytes == 0


def test_compiled_grammars_are_kept_but_not_without_bound() -> None:
    # No CPU time passes, so only the number of grammars counts.
    grammars = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512, clock_of_thread=lambda: lambda: 0.0)
    first = grammars.matcher(Grammar("regex", "a"))
    again = grammars.matcher(Grammar("regex", "a"))
    first.take(66)
    assert first.is_over
    assert not again.is_over, "each sequence stands at its own place"
    for index in range(2 * MAX_COMPILED):
        grammars.matcher(Grammar("regex", f"a{{{index + 1}}}"))
    assert len(grammars._compiled) == MAX_COMPILED


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_only() -> None:
    class Slow:
        is_fast = False

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(UnsupportedByModel, match="tokenizer"):
        Grammars(Slow(), ends={1}, vocab_size=2).matcher(Grammar("regex", "a"))


def test_logits_beyond_the_vocabulary_are_never_sampled() -> None:
    grammars = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=600)
    bits = grammars.matcher(Grammar("regex", "(?s:.*)")).next_mask(grammars.mask_bytes)
    allowed = np.nonzero(mask_bias(bits[None], torch.device("cpu"))[0].numpy() == 0.0)[0]
    assert bits.shape == (76,)
    assert max(allowed) < len(tiny.make_tokenizer("llama"))


@pytest.mark.parametrize("special", [{}, {"</think>": 0}])
@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_come_before_the_language_begins(special: dict[str, int], is_open: bool, grammars: Grammars) -> None:
    """`</think>` as letters, and as a token of its own (here: that of `<s>`)."""
    tokenizer = tiny.make_tokenizer("llama")
    before = preamble(find("</think>", None), is_open=is_open, special=special)
    end = [0] if special else tokenizer.encode("</think>", add_special_tokens=False)

    def follows(text: str, answer: str | None) -> bool:
        """True if the whole answer, or the part after the reasoning, is of the language."""
        matcher = grammars.matcher(Grammar("regex", "[0-9]{3}", preamble=before))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if answer is not None:
            tokens = [*tokens, *end, *tokenizer.encode(answer, add_special_tokens=False)]
        try:
            for token in tokens:
                matcher.take(token)
        except SequenceFailed:
            return False
        return matcher.is_over

    opening = "" if is_open else "<think>"
    assert follows(opening + "Hm, 12 < 3. é", "123")
    assert follows(opening + "Hm", "\n\n123")
    assert not follows(opening + "Hm", "a123")
    assert not follows(opening + "Hm 123", None)
    assert follows("123", None) is not is_open


@pytest.mark.parametrize("special", [True, False])
def test_marks_are_written_as_the_tokens_that_the_model_knows_them_by(special: bool) -> None:
    """Qwen's `<tool_call>` and `</think>` are added tokens that are not special. llguidance would reject an answer
    that spells them letter by letter."""
    tokenizer = tiny.make_tokenizer("llama")
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([transformers.AddedToken(name, special=special, normalized=False) for name in names])
    made = ServedModel(FakeEngine(tokenizer), tokenizer, options())
    assert made.special.keys() >= set(names)
    family = find("<tool_call></tool_call>arguments</think>", None)
    assert family is not None
    assert family.call_syntax is not None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    held = tools.grammar(tools.ToolOptions([tool], [tool], is_required=True), family.call_syntax, made.special)
    before = preamble(family, is_open=True, special=made.special)
    grammars = Grammars(tokenizer, ends={EOS}, vocab_size=len(tokenizer))
    matcher = grammars.matcher(replace(held, preamble=before))
    answer = 'Hm.</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    assert len({made.special[name] for name in names} & set(tokens)) == 3
    for token in tokens:
        matcher.take(token)
    assert matcher.failure == ""
    either = tools.grammar(
        tools.ToolOptions([tool], [tool]),
        family.call_syntax,
        made.special,
        otherwise=Grammar("json_schema", '{"const": 1}', "f"),
    )
    for said in (answer, "Hm.</think> 1"):
        matcher = grammars.matcher(replace(either, preamble=before))
        for token in tokenizer.encode(said, add_special_tokens=False):
            matcher.take(token)
        assert matcher.failure == "", said
    grammars.close()


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("<tool_call></tool_call>arguments", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        ("<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}'),
        ("<TOOLCALL>", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>'),
        ("<|tool_call|><|/tool_call|>", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>'),
        ("functools[", 'functools[{"name": "f", "arguments": {"a": 1}}]'),
        ("<|START_ACTION|>", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>'),
        ("<|CHATBOT_TOKEN|>Action:tool_name", 'Action:\n```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```'),
        ("<tool_calls>", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>'),
        ("JSON array tool_call_name", '[{"name": "f", "arguments": {"a": 1}}]'),
        # no syntax of their own
        ("\uff5cDSML\uff5c", '[{"name": "f", "arguments": {"a": 1}}]'),
        (">>>all", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<|tools_prefix|>", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<function_calls>", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("[func_name1(", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<|tool_call_begin|>", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<minimax:tool_call>", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<seed:tool_call><function=", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<|tool_call_start|>", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("<|tool_call>call:", '[{"name": "f", "arguments": {"a": 1}}]'),
    ],
)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_required_call_is_one_that_is_parsed(source: str, answer: str, calls: int, grammars: Grammars) -> None:
    family = find(source, None)
    assert family is not None
    syntax = call_syntax(family)
    if calls > 1:
        if syntax.between is None:
            return
        before, after = syntax.begin + syntax.each[0], syntax.each[1] + syntax.end
        call = answer.removeprefix(before).removesuffix(after)
        answer = f"{before}{call}{syntax.each[1]}{syntax.between}{syntax.each[0]}{call}{after}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    tokenizer = tiny.make_tokenizer("llama")
    matcher = grammars.matcher(tools.grammar(tools.ToolOptions([tool], [tool], is_required=True), syntax, {}))
    for token in tokenizer.encode(answer, add_special_tokens=False):
        matcher.take(token)
    matcher.take(EOS)
    parser = AnswerParser(ParseOptions(chat_format=family, tools=[tool], is_constrained=True))
    parts = [*(part for letter in answer for part in parser.push(letter)), *parser.finish()]
    assert [part.call and (part.call.name, part.call.arguments) for part in parts] == [("f", '{"a":1}')] * calls


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 3])
def test_reasoning_ends_after_its_budget_and_any_text_follows(budget: int, is_open: bool) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_tokens([transformers.AddedToken(name) for name in ("<think>", "</think>", "<tool_call>")])
    vocabulary = tokenizer.get_vocab()
    begin, end, mark = (vocabulary[name] for name in ("<think>", "</think>", "<tool_call>"))
    word, blank = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("a", "\n"))
    size = len(tokenizer)
    family, special = find("</think>", None), {"<think>": begin, "</think>": end}
    opening = opening_token(family, special)
    assert opening == begin
    before = preamble(family, is_open=is_open, special=special, budget=budget)
    grammars = Grammars(tokenizer, ends={EOS}, vocab_size=size)
    matcher = grammars.matcher(replace(any_text(begin, is_open=is_open), preamble=before))

    def allowed() -> set[int]:
        row = matcher.next_mask(grammars.mask_bytes)
        return {token for token in range(size) if row[token // 8] >> token % 8 & 1}

    everything = set(range(size))
    if not is_open:
        free = matcher.of_choice()
        for token in (word, begin, mark, EOS):  # an answer without reasoning is not limited
            free.take(token)
        assert free.failure == ""
        matcher.take(begin)
    for token in (word, mark, blank)[:budget]:
        assert allowed() == everything
        matcher.take(token)
    assert allowed() == {end}
    assert matcher.allowed([word]) == 0, "a draft does not exceed it either"
    matcher.take(end)
    for token in (blank, word, mark, begin, word):
        assert allowed() >= everything - {begin}
        matcher.take(token)
        assert not matcher.is_over
    assert EOS in allowed()
    grammars.close()


@pytest.fixture(scope="module")
def harmony() -> tuple[Any, dict[str, int], ChatFormat]:
    """A tokenizer with the tokens of gpt-oss, these tokens, and its format."""
    tokenizer = tiny.make_tokenizer("llama")
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
    tokenizer.add_tokens([transformers.AddedToken(mark, special=True) for mark in marks])
    found = find("<|channel|> functions.", None)
    assert found is not None
    return tokenizer, {mark: tokenizer.get_vocab()[mark] for mark in marks}, found


HARMONY_FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("answer", "is_taken"),
    [
        ("<|channel|>analysis<|message|>abc<|end|><|start|>assistant" + HARMONY_FINAL + "a long text", True),
        ("<|channel|>analysis<|message|>abcd<|end|>", False),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", False),
        ("<|channel|>analysis<|message|>a<|end|>" + HARMONY_FINAL, False),
        (
            "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>",
            True,
        ),
        ("<|channel|>commentary<|message|>I call.<|end|><|start|>assistant" + HARMONY_FINAL + "a", True),
        (HARMONY_FINAL + "a long text", True),
        (HARMONY_FINAL + "a<|end|><|start|>assistant<|channel|>analysis<|message|>", False),
    ],
)
def test_a_budget_limits_the_reasoning_of_an_answer_in_messages(harmony: Any, answer: str, is_taken: bool) -> None:
    tokenizer, special, family = harmony
    opening = special["<|channel|>"]
    assert opening_token(family, special) == opening
    before = preamble(family, is_open=False, special=special, budget=3, is_free=True)
    grammars = Grammars(tokenizer, ends={EOS}, vocab_size=len(tokenizer))
    matcher = grammars.matcher(replace(any_text(opening, is_open=False, messages=family.messages), preamble=before))
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    assert (matcher.allowed(tokens) == len(tokens)) is is_taken
    grammars.close()


def test_constrained_text_is_the_final_one_of_the_messages(harmony: Any) -> None:
    tokenizer, special, family = harmony
    grammars = Grammars(tokenizer, ends={EOS}, vocab_size=len(tokenizer))
    held = Grammar("regex", "[0-9]{3}", preamble=preamble(family, is_open=False, special=special))
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for answer, is_taken in ((f"{thoughts}{HARMONY_FINAL}123", True), (f"{HARMONY_FINAL}123", True), ("123", False)):
        matcher = grammars.matcher(held)
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        assert (matcher.allowed(tokens) == len(tokens)) is is_taken
    grammars.close()


# In the sampler


def masks(rows: list[int], allowed: list[list[int]], vocab: int) -> TokenMasks:
    wide = np.zeros((len(rows), (vocab + 31) // 32 * 32), np.uint8)
    for row, tokens in enumerate(allowed):
        wide[row, tokens] = 1
    return TokenMasks(rows, np.packbits(wide, axis=1, bitorder="little"))


@pytest.mark.parametrize("vocab", [24, 64, 71])
def test_a_mask_holds_for_its_rows_only(vocab: int) -> None:
    logits = torch.linspace(0.0, 3.0, vocab).repeat(3, 1)
    picks = [RowSampling(GREEDY)] * 3
    found = sample(logits.clone(), picks, masks([1], [[3, 9]], vocab))
    assert [each and each.token for each in found] == [vocab - 1, 9, vocab - 1]
    found = sample(logits.clone(), picks, masks([0, 1, 2], [[0], [], [7, 2]], vocab))
    assert [each and each.token for each in found] == [0, None, 7], "a row that nothing is allowed has no token"
    found = sample(logits.clone(), picks, None)
    assert [each and each.token for each in found] == [vocab - 1] * 3


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {4, 5}),  # the two likeliest of the allowed tokens, not of all
        (SamplingParams(temperature=1.0, top_p=0.6), {5}),
        (SamplingParams(temperature=1.0, min_p=0.5), {5}),
        (SamplingParams(temperature=1.0), {3, 4, 5}),
        (SamplingParams(temperature=1.0, logit_bias={3: 8.0}, top_k=1), {3}),
        (SamplingParams(temperature=1.0, logit_bias={9: 90.0}), {3, 4, 5}),  # no bias allows a forbidden token
    ],
)
def test_filters_apply_to_the_tokens_that_the_grammar_allows(sampling: SamplingParams, expected: set[int]) -> None:
    logits = torch.arange(12.0)
    found = set()
    for step in range(100):
        pick = RowSampling(sampling, uniform=(step + 0.5) / 100)
        (sampled,) = sample(logits.clone()[None], [pick], masks([0], [[3, 4, 5]], 12))
        assert sampled is not None
        found.add(sampled.token)
    assert found == expected


def test_a_set_bit_costs_nothing_and_any_other_everything() -> None:
    bits = np.random.default_rng(3).integers(0, 256, (5, 40), dtype=np.uint8)
    expected = np.where(np.unpackbits(bits, axis=1, bitorder="little") == 1, 0.0, -np.inf)
    assert np.array_equal(mask_bias(bits, torch.device("cpu")).numpy(), expected)


def test_slow_masks_leave_time_only_to_other_requests_and_only_where_these_are_computed_on_the_cpu() -> None:
    for rests, has_neighbours in ((False, True), (True, False), (True, True)):
        grammars = Grammars(tiny.make_tokenizer("llama"), ends={EOS}, vocab_size=512, rests=rests)
        grammars.has_neighbours = has_neighbours
        factor = REST_FACTOR if rests and has_neighbours else 0
        assert grammars.rest(0.02) == pytest.approx(factor * 0.02)
        assert grammars.rest(9.0) == pytest.approx(factor * MASK_SECONDS), "a detached mask is not waited for"


async def test_only_sequences_without_a_slow_grammar_are_neighbours_of_one(engine: TransformersEngine) -> None:
    loop = engine._generation
    assert loop is not None
    seen: list[tuple[int, bool]] = []
    usual = loop._hold_late

    def noted() -> None:
        for choice in loop._active:
            if choice.matcher is not None:
                choice.matcher.lexer.slow.add(choice.matcher)
                choice.matcher.is_slow = False  # a usual mask may follow a slow one
        usual()
        free = sum(choice.matcher is None for choice in loop._active)
        seen.append((free, engine._grammars.has_neighbours))

    loop._hold_late = noted  # type: ignore[method-assign]
    try:
        await complete_one(engine, PROMPT, grammar=Grammar("regex", "[a-z ]{1,400}", "regex"), max_tokens=4)
        await complete_one(engine, PROMPT, max_tokens=4)
    finally:
        loop._hold_late = usual  # type: ignore[method-assign]
    assert {found for _, found in seen} == {True, False}
    assert all(found == (free > 0) for free, found in seen)
