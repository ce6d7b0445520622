"""Grammars: token masks for constrained decoding, by llguidance, as packed bits.

A model without grammars pays nothing: llguidance is imported and given the vocabulary when the first grammar is
compiled. This takes 0.9 s and 140 MB of host memory for 151,000 tokens, once, off the step loop; a schema adds
milliseconds. Masks are computed on other threads while the model computes logits. llguidance releases the interpreter
lock meanwhile. 16 rows of 151,936 tokens take 0.6 ms on one core.

A grammar comes from a client, and some take a second per token. So its work is bounded, in CPU time:

* Compiling: by the size of the text and of the grammar, and by COMPILE_SECONDS. Long texts are compiled on a thread of
  their own, so that they do not delay short ones. A compilation that takes more than DETACH_SECONDS is detached, so
  that those behind it continue.
* Each mask: by MASK_SECONDS. A request with a slower one ends with an error of its own.

No step waits for a mask while other sequences can go on. A sequence whose mask is late gets no token in that step. It
sits out until the mask is there, and its newest token is then computed again (`loop.generation_loop`). Masks behind
slow ones are not late: those of grammars that had a slow one are computed on a thread of their own.
"""

import asyncio
import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from worker.engines.transformers.device import memory
from worker.engines.transformers.device.cuda_errors import one_line
from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.sample.work_thread import Clock, Job, WorkThread, thread_clock
from worker.errors import Draining, InvalidValue, RequestError, SequenceFailed, UnsupportedByModel
from worker.interface import JSON_WHITESPACE, Grammar
from worker.protocol.memory import (
    COMPILER_STACK_BYTES,
    GRAMMAR_BYTES,
    GRAMMAR_ENTRY_BYTES,
    MAX_GRAMMAR_LENGTH,
    MIB,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint8]  # one bit per token: bit `i % 8` of byte `i // 8` is that of token i
MAX_COMPILED = 32  # compiled grammars in the LRU cache; that of a usual schema takes about a megabyte. A guess
# CPU time that all compiled grammars in the LRU cache took, which bounds their memory: `(a{1000}){70}` takes 0.09 s and
# 24 MiB, a schema of 3,000 properties 0.4 s and 10 MiB, and 32 usual schemas 0.06 s and 8 MiB (llguidance 1.9).
KEPT_SECONDS = 0.1
# Main memory that one compilation may take, beside the tables of the vocabulary. Measured: 10 MiB for a short text. And
# of a long text, or one with counted repetitions: 68 MiB for `(a{1000}){200}`, 51 for a schema of 7,000 properties, 120
# with what is freed only later (llguidance 1.9).
COMPILING_BYTES, LARGE_COMPILING_BYTES = 48 * MIB, 128 * MIB
# CPU time of a compilation after which freed memory is returned to the system. `(a{1000}){70}` leaves 50 MiB of it.
TRIM_SECONDS = 0.02
LONG_TEXT = 1 << 13  # characters of a grammar that is compiled on the thread for long ones
# Symbols of a grammar. llguidance compiles 50,000 in half a second, and fails from 65,525 alternatives and options on.
MAX_SYMBOLS = 100_000
# llguidance's measure of work for regular expressions. Each unit takes up to 240 bytes. A regular expression of 20,000
# words needs 200,000. The default is 1,000,000.
MAX_LEXER_FUEL = 250_000
COMPILE_SECONDS = 10.0
DETACH_SECONDS = 0.25
MAX_DETACHED = 1  # detached compilations at once, to bound their memory and the cores that they take
MASK_SECONDS = 0.2
# CPU time of a slow mask. A usual one takes 0.05 ms for 128,000 tokens. Rules that repeat single characters take 7 ms
# (english.gbnf of llama.cpp).
SLOW_SECONDS = 0.002
# On a CPU, slow masks take a fifth of a core while other requests run: after each, their thread pauses for this
# multiple of its CPU time. A lower priority of the thread was rejected: beside two busy programs, an unconstrained
# stream took 57 ms per token with it and 44 without, because a thread that got no core kept the interpreter lock.
REST_FACTOR = 4
# The longest wait for a mask in a step in which no other sequence can go on. Requests that arrive meanwhile wait, too.
ALONE_SECONDS = 0.01
_POLL_INTERVAL = 0.05  # seconds between looks at the CPU time of a job
# Parts of llguidance's messages about its own limits, which depend on the grammar alone.
_LIMIT_MESSAGES = ("too many", "max is", "fuel", "too big", "too complex", "limit", "panic")
# llguidance's messages that do not name the fault, or not the remedy, with one that does.
_PLAINER = {
    # A stop reason of llguidance by its name in the source: no token can follow.
    "NoExtensionBias": "it matches no text: give each rule an alternative without itself, and each class a character",
    "No 'root' rule found": "it has no rule named root; begin it with root ::=",
    "no start rule found": "it has no rule named start; begin it with start:",
}
# A counted repetition, in regular expressions (also those of a schema), GBNF and Lark.
_COUNTED = re.compile(r"[{~]\s*\d")
_GBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)
# A literal, a class, a comment or a name of a grammar in GBNF; and an escape in a literal or class.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
_GBNF_TOKEN = re.compile(_GBNF_PART.pattern + "|[()*+?{}]", re.DOTALL)
_CODE_POINT = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CONVERTED = "Failed to convert the grammar from GBNF to Lark: "


def vocabulary_bytes(tokenizer: Any, vocab_size: int) -> int:
    """Main memory that constrained decoding takes once the first grammar is compiled."""
    return GRAMMAR_BYTES + GRAMMAR_ENTRY_BYTES * vocab_size if getattr(tokenizer, "is_fast", False) else 0


class Lexer:
    """The lexer of a compiled grammar in llguidance, which all copies of the matcher share.

    A call locks it. Most calls that wait for this lock hold the interpreter lock meanwhile, so a slow mask would stop
    all threads. So a copy calls llguidance only while it has the turn.
    """

    def __init__(self, other: "LLMatcher"):
        """`other`: a matcher of another grammar (see `take_slowly`)."""
        self.lock = threading.Lock()
        self.slow: WeakSet[GrammarMatcher] = WeakSet()  # copies that had a slow mask
        self._other = other

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Take the turn if it is free. Yields whether it was."""
        is_free = self.lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self.lock.release()

    def take_slowly(self, matcher: "LLMatcher", token: int) -> bool:
        """Let `matcher` take `token` in a turn, without the interpreter lock. False if it does not allow the token.

        A matcher's own call keeps the lock, for as long as its last mask took. So does LLExecutor with one matcher
        (llguidance 1.9). With another one beside it, it releases the lock, and takes 0.1 ms more.
        """
        from llguidance import LLExecutor

        return LLExecutor(1).consume_token_par([(matcher, token), (self._other, token)])[0]


class GrammarMatcher:
    """The position of one sequence in its grammar. It survives preemption, since the tokens are not lost either.

    While the job of its mask runs, nothing but `mask`, `field` and `has_slow_grammar` may be used.
    """

    def __init__(self, matcher: "LLMatcher", field: str, lexer: Lexer):
        """`field`: the request's field, for errors."""
        self._matcher, self.field, self.lexer = matcher, field, lexer
        self.mask: Job[Bits] | None = None  # of the next token; None until it is asked for
        self.is_slow = False  # the last mask or draft took long, so the next token will
        self._untaken: list[int] = []  # tokens that `next_mask` takes
        self._is_complete = False  # the text before the next token of `mask` is complete

    def of_request(self, field: str) -> "GrammarMatcher":
        """A copy for another request, which names the grammar in `field`. At the same position, with the same mask."""
        copy = GrammarMatcher(self._matcher.deep_copy(), field, self.lexer)
        copy.mask, copy._is_complete = self.mask, self._is_complete
        return copy

    def of_choice(self) -> "GrammarMatcher":
        """A copy for another choice of the same request."""
        return self.of_request(self.field)

    @property
    def has_slow_grammar(self) -> bool:
        """True if this or another copy had a slow mask."""
        return len(self.lexer.slow) > 0

    def allowed(self, tokens: Sequence[int]) -> int:
        """Number of leading tokens of `tokens`, a draft, that the grammar allows. 0 if it is slow, or another copy has
        its turn."""
        with self.lexer.turn() as is_free:
            if self.is_slow or not is_free or not self._take_all():
                return 0
            begin = time.thread_time()
            count = self._matcher.validate_tokens(list(tokens))
            self.is_slow = time.thread_time() - begin > SLOW_SECONDS
            return 0 if self.is_slow else count

    def after_each(self, tokens: Sequence[int]) -> list["GrammarMatcher"]:
        """The matcher after one, two, ... and all of `tokens`, which are allowed. Unchanged itself. None of them if
        another copy has its turn, or a job computes the mask."""
        found: list[GrammarMatcher] = []
        with self.lexer.turn() as is_free:
            later = self._matcher
            for token in tokens if is_free else ():
                later = later.deep_copy()
                later.consume_token(token)
                found.append(GrammarMatcher(later, self.field, self.lexer))
        return found

    def take(self, token: int) -> bool:
        """Advance by `token`. Raises InvalidValue if the grammar is too complex, SequenceFailed if it does not allow
        the token.

        This may take as long as the mask that allowed the token. So a slow grammar takes it with the next mask, and so
        does any while another copy has its turn. False if it is left for the next mask.
        """
        self.mask = None
        self._untaken.append(token)
        if not self.is_slow:
            with self.lexer.turn() as is_free:
                if is_free and not self._take_all():
                    raise self.error()
        return not self._untaken

    def _take_all(self) -> bool:
        """Take the tokens that were left, in a turn. False if the grammar does not allow them."""
        tokens, self._untaken = self._untaken, []
        if self.is_slow:
            return all(self.lexer.take_slowly(self._matcher, token) for token in tokens)
        return all(self._matcher.consume_token(token) for token in tokens)

    def error(self) -> RequestError:
        """The error of a request that its grammar ends."""
        failure = self.failure
        if any(part in failure.lower() for part in _LIMIT_MESSAGES):
            return _too_complex(self.field, failure)
        return SequenceFailed(f"the grammar of this request does not allow the next token: {failure}")

    @property
    def is_over(self) -> bool:
        """True if the text is complete and nothing can follow it. False while tokens are left for the next mask, which
        allows the end only."""
        return not self._untaken and self._matcher.is_stopped() and not self._matcher.is_error()

    def can_only_end(self, ends: Collection[int]) -> bool:
        """True if the text before the next token of `mask` is complete and only tokens of `ends` may follow."""
        if self.mask is None or not self._is_complete:
            return False
        bits = np.unpackbits(self.mask.future.result(), bitorder="little")
        return set(np.nonzero(bits)[0].tolist()) <= set(ends)

    def next_mask(self, size: int, make_way: Callable[[], None] = lambda: None) -> Bits:
        """Compute the mask of the next token, uint8 `[size]`. All zeros once the grammar has failed. On any thread.

        make_way: called before a long wait for the turn of another copy.
        """
        begin = time.thread_time()
        row = np.zeros(size, np.uint8)
        if not self.lexer.lock.acquire(timeout=SLOW_SECONDS):
            make_way()
            self.lexer.lock.acquire()
        try:
            self._take_all()
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._is_complete = self._matcher.is_accepting()
        finally:
            self.lexer.lock.release()
        if self._matcher.is_error():  # llguidance would allow the end, and the client would get an incomplete text
            row[:] = 0
        self.is_slow = time.thread_time() - begin > SLOW_SECONDS
        if self.is_slow:
            self.lexer.slow.add(self)
        return row

    @property
    def failure(self) -> str:
        """The reason why the grammar cannot continue, for example its complexity. Empty if it can."""
        return _message(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammars:
    """The grammars of one model: compiles them and computes masks."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        ends: Collection[int],
        vocab_size: int,
        compile_seconds: float = COMPILE_SECONDS,
        clock_of_thread: Callable[[], Clock] = thread_clock,
        growth: Growth | None = None,
        rests: bool = False,
    ):
        """`ends`: tokens that end an answer; `vocab_size`: width of the model's logits; `compile_seconds`: CPU time
        that one grammar may take; `clock_of_thread`: as of WorkThread; `growth`: announces main memory; None: not;
        `rests`: the thread of slow masks pauses, so that steps get the CPU."""
        self._compile_seconds, self._clock_of_thread = compile_seconds, clock_of_thread
        self._growth = growth or Growth()
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of the two below
        # Each with the CPU time that it took; 0.0 for an error, which takes no memory.
        self._compiled: OrderedDict[Grammar, tuple[GrammarMatcher | InvalidValue, float]] = OrderedDict()
        self._environment: LLTokenizer | None = None
        self._building = threading.Lock()
        self._rests = rests
        self.has_neighbours = False  # sequences without a slow grammar run
        self._mask_threads = (
            WorkThread("grammar", clock_of_thread),
            WorkThread("grammar-slow", clock_of_thread, rest=self.rest),
        )
        self._compilers = tuple(
            WorkThread(name, clock_of_thread, stack_bytes=COMPILER_STACK_BYTES)
            for name in ("grammar-compiler", "grammar-compiler-long")
        )
        self._detached = threading.Semaphore(MAX_DETACHED)
        self._is_closed = False

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a text. Blocks while it compiles. From any thread.

        Raises InvalidValue with the grammar's field, UnsupportedByModel for a tokenizer that llguidance cannot read.
        """
        with self._lock:
            found, _ = self._compiled.get(grammar, (None, 0.0))
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            if len(grammar.text) > MAX_GRAMMAR_LENGTH:
                raise InvalidValue(
                    f"{grammar.field} has {len(grammar.text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed",
                    param=grammar.field,
                )
            tables = self.bytes_to_come if self._environment is None else 0
            with self._growth.announced(_compiling_bytes(grammar) + tables):
                found = self._add(grammar)
        if isinstance(found, InvalidValue):
            # a new one: the caller may change it, and an equal grammar may have been in another field
            raise InvalidValue(grammar.field + found.message.removeprefix(str(found.param)), param=grammar.field)
        return found.of_request(grammar.field)

    def _add(self, grammar: Grammar) -> GrammarMatcher | InvalidValue:
        """Compile a grammar and keep the result."""
        with self._building:  # its time is not that of the grammar
            environment = self._environment or self._build()
        clock = self._clock_of_thread()
        begun = clock()
        found: GrammarMatcher | InvalidValue
        try:
            found = self._compile(grammar, environment)
        except InvalidValue as error:
            found = error
        seconds = clock() - begun
        self._keep(grammar, found, 0.0 if isinstance(found, InvalidValue) else seconds)
        if seconds > TRIM_SECONDS or len(grammar.text) > LONG_TEXT:
            memory.give_back()  # 120 MB for one of 230,000 characters
        return found

    def _keep(self, grammar: Grammar, compiled: GrammarMatcher | InvalidValue, seconds: float = 0.0) -> None:
        """Keep a compiled grammar, or the error, so that a repeated request does not cost the same time again.

        `seconds`: the CPU time that it took. The last one is kept in any case.
        """
        with self._lock:
            self._compiled[grammar] = compiled, seconds
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or self._seconds > KEPT_SECONDS):
                self._compiled.popitem(last=False)

    @property
    def _seconds(self) -> float:
        return sum(seconds for _, seconds in self._compiled.values())

    @property
    def bytes_to_come(self) -> int:
        """Main memory that grammars may still take."""
        if self._environment is not None:
            return GRAMMAR_BYTES * (MAX_COMPILED - len(self._compiled)) // MAX_COMPILED
        return vocabulary_bytes(self._tokenizer, self._vocab_size)

    async def compiled(self, grammar: Grammar) -> GrammarMatcher:
        """Run `matcher` on a compiler thread, so that a large grammar delays neither asyncio nor the step loop.

        Raises the errors of `matcher`, InvalidValue if it takes more than `compile_seconds`, Draining after `close`.
        """
        if self._is_closed:
            raise Draining("the model is being unloaded")
        thread = self._compilers[len(grammar.text) > LONG_TEXT]
        job = thread.submit(functools.partial(self.matcher, grammar))
        future = asyncio.wrap_future(job.future)
        try:
            while not (await asyncio.wait({future}, timeout=_POLL_INTERVAL))[0]:
                self._pass_slow(thread)
                if job.cpu_seconds > self._compile_seconds:
                    error = _uncompilable(grammar, f"it takes more than {self._compile_seconds:.0f} s")
                    self._keep(grammar, error)
                    raise error
            return future.result()
        finally:
            future.cancel()  # a grammar that waits for its turn is dropped

    def _pass_slow(self, thread: WorkThread) -> None:
        """Detach a slow compilation, so that the grammars behind it are compiled. Its client may have disconnected."""
        job = thread.current
        if job is None:
            return
        if job.cpu_seconds > self._compile_seconds:
            thread.detach(job)
        elif job.cpu_seconds > DETACH_SECONDS and self._detached.acquire(blocking=False):
            thread.detach(job)
            job.future.add_done_callback(lambda _: self._detached.release())

    def mask(self, matcher: GrammarMatcher) -> Job[Bits]:
        """The mask of the next token, which another thread computes. Asking again gives the same job."""
        if matcher.mask is None:
            thread = self._mask_threads[matcher.has_slow_grammar]
            matcher.mask = thread.submit(functools.partial(matcher.next_mask, self.mask_bytes, thread.make_way))
        return matcher.mask

    def is_late(self, matcher: GrammarMatcher) -> bool:
        """True if the mask of the next token was asked for and is not there. Raises InvalidValue if it takes too
        long."""
        job = matcher.mask
        if job is None or job.future.done():
            return False
        for thread, most in zip(self._mask_threads, (SLOW_SECONDS, MASK_SECONDS), strict=True):
            current = thread.current
            if current is not None and current.cpu_seconds > most:
                thread.detach(current)
        if job.cpu_seconds > MASK_SECONDS:
            raise _too_complex(matcher.field, "choosing a token takes too long")
        return True

    def rest(self, seconds: float) -> float:
        """Return the pause in seconds after a slow mask that took `seconds` of CPU time."""
        return REST_FACTOR * min(seconds, MASK_SECONDS) if self._rests and self.has_neighbours else 0.0

    @functools.cached_property
    def mask_bytes(self) -> int:
        """Bytes of a mask: a bit for each token, in words of 32."""
        return (self._tokens + 31) // 32 * 4

    def close(self) -> None:
        """Stop the threads, if they were started."""
        self._is_closed = True
        for thread in (*self._mask_threads, *self._compilers):
            thread.close()

    @functools.cached_property
    def _tokens(self) -> int:
        """The larger of both vocabularies: some models have more logits than tokens, some tokenizers more tokens."""
        return max(self._vocab_size, int(max(self._tokenizer.get_vocab().values())) + 1)

    def _compile(self, grammar: Grammar, environment: "LLTokenizer") -> GrammarMatcher:
        import llguidance  # late: the import takes a tenth of a second, and few requests need it

        try:
            source = _with_preamble(grammar.preamble, _source(grammar))
        except Exception as error:  # noqa: BLE001 - untrusted input: the converters raise anything
            raise _uncompilable(grammar, _plainer(one_line(error))) from None

        limits = llguidance.LLParserLimits(
            verbose_errors=False, max_grammar_size=MAX_SYMBOLS, initial_lexer_fuel=MAX_LEXER_FUEL
        )
        matcher = llguidance.LLMatcher(environment, source, log_level=0, limits=limits)
        other = llguidance.LLMatcher(environment, llguidance.LLMatcher.grammar_from_lark('start: ""'), log_level=0)
        compiled = GrammarMatcher(matcher, grammar.field, Lexer(other))
        if not matcher.is_error():
            # The first mask may take seconds. Copies have it, so no step has to wait for it.
            compiled.mask = Job(functools.partial(compiled.next_mask, self.mask_bytes))
            compiled.mask.run()
            compiled.lexer.slow.clear()  # what it took is shared
        if matcher.is_error():
            raise _uncompilable(grammar, _message(matcher.get_error()))
        return compiled

    def _build(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise UnsupportedByModel(
                "this model does not support constrained output: its tokenizer has no tokenizer.json; remove the field"
            )
        try:
            self._environment = LLTokenizer(
                _serialized(self._tokenizer), n_vocab=self._tokens, eos_token=self._ends or None
            )
        except ValueError as error:
            raise UnsupportedByModel(
                f"this model does not support constrained output: llguidance cannot read its tokenizer"
                f" ({_message(str(error))}); remove the field"
            ) from None
        return self._environment


def _compiling_bytes(grammar: Grammar) -> int:
    """Main memory that its compilation may take, beside the tables of the vocabulary."""
    is_large = len(grammar.text) > LONG_TEXT or _COUNTED.search(grammar.text)
    return LARGE_COMPILING_BYTES if is_large else COMPILING_BYTES


def _serialized(tokenizer: Any) -> str:
    """The tokenizer as JSON, without padding and truncation that an earlier call may have set."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation. Raises errors of the converters."""
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text,
                defaults={"whitespace_pattern": JSON_WHITESPACE},
                overrides={"lenient": True} if grammar.lenient else None,
            )
        case "regex":
            if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
                raise ValueError("it ends with a backslash that escapes nothing")  # llguidance would drop it
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "gbnf":
            is_gbnf = _GBNF_ROOT.search(grammar.text)  # the fields for it also take Lark, as in vLLM
            text = _kept_groups(_GBNF_PART.sub(_plain_gbnf, grammar.text)) if is_gbnf else grammar.text
            return grammar_from("gbnf", text)
        case "choice":
            return grammar_from("choice", grammar.text)


def _plain_gbnf(part: re.Match[str]) -> str:
    """A part of a grammar in GBNF, without what llguidance 1.9 misreads.

    It drops the zeros of \\u00e9, takes && and ~~ in a class for operators, and a rule named start for Lark.
    """
    text = part[0]
    if text[0] in '"[':
        text = _CODE_POINT.sub(_code_point, text)
    if text[0] == "[":
        return text.replace("&", r"\x26").replace("~", r"\x7e")
    return "start-rule" if text == "start" else text


def _kept_groups(text: str) -> str:
    """A grammar in GBNF whose repeated groups keep their parentheses.

    llguidance 1.9 drops those around one item, so that ([a-z]+)? would have two repetitions side by side. An empty
    literal makes it two items.
    """
    parts, opened, begins = list(_GBNF_TOKEN.finditer(text)), [], []
    for before, part, after in zip(parts, parts[1:], parts[2:], strict=False):
        if part[0] == "(":
            opened.append(part.end())
        elif part[0] == ")" and opened:
            begin = opened.pop()
            if before[0] in "*+?})" and after[0] in "*+?{":
                begins.append(begin)
    pieces = [text[begin:end] for begin, end in pairwise([0, *sorted(begins), len(text)])]
    return '"" '.join(pieces)


def _code_point(escape: re.Match[str]) -> str:
    number = int(escape[1] or escape[2] or "-1", 16)
    if number < 0 or number > 0x10FFFF or 0xD800 <= number < 0xE000:
        return escape[0]
    return chr(number) if number >= 0x80 else f"\\x{number:02x}"


def _with_preamble(preamble: str, source: str) -> str:
    """A grammar that begins with the rules of `preamble`, in Lark, and continues with `source`."""
    if not preamble:
        return source
    language = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    whole = {"name": "whole", "lark_grammar": f"start: preamble @language\n{preamble}"}
    return json.dumps({"grammars": [whole, {**language[0], "name": "language"}, *language[1:]]})


def _uncompilable(grammar: Grammar, why: str) -> InvalidValue:
    return InvalidValue(f"{grammar.field} cannot be compiled: {why}", param=grammar.field)


def _too_complex(field: str, why: str) -> InvalidValue:
    message = f"{field} is too complex: {why}; write it with fewer alternatives and less ambiguity"
    return InvalidValue(message, param=field)


def _message(error: str) -> str:
    """llguidance's message without the parser state that it appends, and without the text of a panic."""
    if error.lstrip().startswith("panic"):
        return "it is too large or too deeply nested"
    return _plainer(one_line(ValueError(error.partition("<non-verbose/>")[0].partition("<state>")[0])))


def _plainer(message: str) -> str:
    message = message.removeprefix(_CONVERTED)
    return _PLAINER.get(message, message)
