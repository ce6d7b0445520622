"""Grammars to token masks, by llguidance: which tokens of the vocabulary may come next, packed as bits.

A model that nobody asks for a grammar pays nothing: llguidance is imported and told of the vocabulary when the first
one is compiled (0.9 s and 140 MB of host memory for 151,000 tokens, once, off the step loop; a schema takes
milliseconds more). The masks of a step are computed on a thread of their own while the model computes its logits;
llguidance lets go of the interpreter meanwhile. (16 rows of 151,936 tokens take 0.6 ms on one core.)
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from worker.engines.transformers.device.memory import one_line
from worker.errors import InvalidValue, SequenceFailed, UnsupportedByModel
from worker.interface import JSON_WHITESPACE, Grammar
from worker.protocol.memory import GRAMMAR_BYTES, GRAMMAR_ENTRY_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint8]
"""A bit for each token, packed: bit `i % 8` of byte `i // 8` is that of token i."""
COMPILED = 32
"""Grammars that stay compiled, those used last; that of a usual schema takes about a megabyte."""
MAX_TEXT = 1 << 18
"""Characters of a grammar: a bound on what one request may have compiled."""


def vocabulary_bytes(tokenizer: Any, vocab_size: int) -> int:
    """What answers held to a grammar will take of main memory, once somebody asks for the first one."""
    return GRAMMAR_BYTES + GRAMMAR_ENTRY_BYTES * vocab_size if getattr(tokenizer, "is_fast", False) else 0


class Matcher:
    """Where one sequence stands in its grammar. A preempted sequence keeps it: what was said stays said."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy())

    def take(self, token: int) -> None:
        """The sequence got `token`. Raises SequenceFailed if the grammar cannot have it."""
        if not self._matcher.consume_token(token):
            raise SequenceFailed(f"the grammar of this request cannot go on: {self.failure}")

    @property
    def is_over(self) -> bool:
        """The text is complete, and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def can_only_end(self, ends: Collection[int]) -> bool:
        """The text is complete as it is, and of all tokens only `ends` may follow."""
        if self._matcher.is_error() or not self._matcher.is_accepting():
            return False
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return set(np.nonzero(bits)[0].tolist()) <= set(ends)

    def fill(self, row: Bits) -> None:
        """Write the mask of the next token into `row`, uint8 `[bytes]`; no bit is set once the grammar has failed."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():  # llguidance lets such a text end; it is not what was asked for
            row[:] = 0

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on, too complex a one say; empty if it can."""
        return _said(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammars:
    """Compiles grammars for one model, and computes their masks."""

    def __init__(self, tokenizer: Any, *, ends: Collection[int], vocab_size: int):
        """`ends`: tokens that end an answer; `vocab_size`: of the model's logits."""
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._environment: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of a text. Blocks while it compiles, one at a time. From any thread.

        Raises InvalidValue naming the grammar's field, UnsupportedByModel for a tokenizer that llguidance cannot read.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compile(grammar)
                self._compiled[grammar] = found
                if len(self._compiled) > COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found.copy()

    @property
    def bytes_to_come(self) -> int:
        """What grammars that nobody has sent yet will take of main memory."""
        if self._environment is not None:
            return GRAMMAR_BYTES * (COMPILED - len(self._compiled)) // COMPILED
        return vocabulary_bytes(self._tokenizer, self._vocab_size)

    def begin(self, grammar: Grammar) -> "Future[Matcher]":
        """`matcher`, on a thread of its own: however much there is to compile, nobody else's threads are taken."""
        return self._compiler.submit(self.matcher, grammar)

    def masks(self, matchers: Sequence[Matcher]) -> "Future[Bits]":
        """What each allows next, uint8 `[matchers, bytes]` (`sampler.Masks`), computed meanwhile on another thread.

        Nobody may use the matchers before it is done. Doing it again gives the same.
        """
        return self._thread.submit(self._fill, list(matchers))

    def close(self) -> None:
        """Let the threads go, if there are any."""
        for name in ("_thread", "_compiler"):
            if name in self.__dict__:
                self.__dict__[name].shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def _fill(self, matchers: list[Matcher]) -> Bits:
        bits = np.zeros((len(matchers), (self._tokens + 31) // 32 * 4), np.uint8)
        for row, matcher in zip(bits, matchers, strict=True):
            matcher.fill(row)
        return bits

    @functools.cached_property
    def _tokens(self) -> int:
        """Some models have more logits than tokens; some tokenizers have more tokens than their model."""
        return max(self._vocab_size, int(max(self._tokenizer.get_vocab().values())) + 1)

    def _compile(self, grammar: Grammar) -> Matcher:
        import llguidance  # late: a tenth of a second for those who use it only

        if len(grammar.text) > MAX_TEXT:
            raise InvalidValue(
                f"{grammar.field} has {len(grammar.text)} characters; {MAX_TEXT} can be compiled", param=grammar.field
            )
        environment = self._environment or self._build()
        try:
            source = _after(grammar.preamble, _source(grammar))
        except Exception as error:  # noqa: BLE001 - whatever a converter in Python makes of a stranger's text
            raise _uncompilable(grammar, one_line(error)) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(environment, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask may take seconds; copies share what it found, and no step waits
        if matcher.is_error():
            raise _uncompilable(grammar, _said(matcher.get_error()))
        return Matcher(matcher)

    def _build(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise UnsupportedByModel(
                "answers of this model cannot be constrained: its tokenizer has no tokenizer.json; leave the field out"
            )
        try:
            self._environment = LLTokenizer(
                _serialized(self._tokenizer), n_vocab=self._tokens, eos_token=self._ends or None
            )
        except ValueError as error:
            raise UnsupportedByModel(
                f"answers of this model cannot be constrained: its tokenizer is of a kind unknown here"
                f" ({_said(str(error))}); leave the field out"
            ) from None
        return self._environment


def _serialized(tokenizer: Any) -> str:
    """The tokenizer as JSON, without what a batch once asked of it."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation; raises whatever the converters raise."""
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text,
                defaults={"whitespace_pattern": JSON_WHITESPACE},
                overrides={"lenient": True} if grammar.lenient else None,
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "choice" | "gbnf":
            return grammar_from(grammar.kind, grammar.text)


def _after(preamble: str, source: str) -> str:
    """What may come before, in Lark, then the grammar itself."""
    if not preamble:
        return source
    held = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    whole = {"name": "whole", "lark_grammar": f"start: preamble @held\n{preamble}"}
    return json.dumps({"grammars": [whole, {**held[0], "name": "held"}, *held[1:]]})


def _uncompilable(grammar: Grammar, why: str) -> InvalidValue:
    return InvalidValue(f"{grammar.field} cannot be compiled: {why}", param=grammar.field)


def _said(error: str) -> str:
    """What llguidance says, without the state that it adds."""
    return one_line(ValueError(error.partition("<non-verbose/>")[0].partition("<state>")[0]))
