"""Grammars: token masks for constrained decoding, by llguidance, as packed bits.

A model without grammars pays nothing: llguidance is imported and given the vocabulary when the first grammar is
compiled. This takes 0.9 s and 140 MB of host memory for 151,000 tokens, once, off the step loop; a schema adds
milliseconds. The masks of a step are computed on another thread while the model computes logits. llguidance releases
the interpreter lock meanwhile. 16 rows of 151,936 tokens take 0.6 ms on one core.
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

from worker.engines.transformers.device.cuda_errors import one_line
from worker.errors import InvalidValue, SequenceFailed, UnsupportedByModel
from worker.interface import JSON_WHITESPACE, Grammar
from worker.protocol.memory import GRAMMAR_BYTES, GRAMMAR_ENTRY_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint8]  # one bit per token: bit `i % 8` of byte `i // 8` is that of token i
MAX_COMPILED = 32  # compiled grammars in the LRU cache; that of a usual schema takes about a megabyte. A guess
MAX_TEXT = 1 << 18  # characters of a grammar, to bound the work of one request


def vocabulary_bytes(tokenizer: Any, vocab_size: int) -> int:
    """Main memory that constrained decoding takes once the first grammar is compiled."""
    return GRAMMAR_BYTES + GRAMMAR_ENTRY_BYTES * vocab_size if getattr(tokenizer, "is_fast", False) else 0


class GrammarMatcher:
    """The position of one sequence in its grammar. It survives preemption, since the tokens are not lost either."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy())

    def take(self, token: int) -> None:
        """Advance by `token`. Raises SequenceFailed if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise SequenceFailed(f"the grammar of this request does not allow the next token: {self.failure}")

    @property
    def is_over(self) -> bool:
        """True if the text is complete and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def can_only_end(self, ends: Collection[int]) -> bool:
        """True if the text is complete and only tokens of `ends` may follow."""
        if self._matcher.is_error() or not self._matcher.is_accepting():
            return False
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return set(np.nonzero(bits)[0].tolist()) <= set(ends)

    def fill(self, row: Bits) -> None:
        """Write the mask of the next token into `row`, uint8 `[bytes]`. All zeros once the grammar has failed."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():  # llguidance would allow the end, and the client would get an incomplete text
            row[:] = 0

    @property
    def failure(self) -> str:
        """The reason why the grammar cannot continue, for example its complexity. Empty if it can."""
        return _message(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammars:
    """The grammars of one model: compiles them and computes masks."""

    def __init__(self, tokenizer: Any, *, ends: Collection[int], vocab_size: int):
        """`ends`: tokens that end an answer; `vocab_size`: width of the model's logits."""
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()
        self._environment: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a text. Blocks while it compiles, one grammar at a time. From any thread.

        Raises InvalidValue with the grammar's field, UnsupportedByModel for a tokenizer that llguidance cannot read.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compile(grammar)
                self._compiled[grammar] = found
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found.copy()

    @property
    def bytes_to_come(self) -> int:
        """Main memory that grammars may still take."""
        if self._environment is not None:
            return GRAMMAR_BYTES * (MAX_COMPILED - len(self._compiled)) // MAX_COMPILED
        return vocabulary_bytes(self._tokenizer, self._vocab_size)

    def begin(self, grammar: Grammar) -> "Future[GrammarMatcher]":
        """Run `matcher` on the compiler thread, so that a large grammar delays neither asyncio nor the step loop."""
        return self._compiler.submit(self.matcher, grammar)

    def masks(self, matchers: Sequence[GrammarMatcher]) -> "Future[Bits]":
        """Masks of the next tokens, uint8 `[matchers, bytes]` (`sampler.TokenMasks`), computed on another thread.

        The matchers must not be used before the result is there. Computing a mask again gives the same.
        """
        return self._thread.submit(self._fill, list(matchers))

    def close(self) -> None:
        """Stop the threads, if they were started."""
        for name in ("_thread", "_compiler"):
            if name in self.__dict__:
                self.__dict__[name].shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def _fill(self, matchers: list[GrammarMatcher]) -> Bits:
        bits = np.zeros((len(matchers), (self._tokens + 31) // 32 * 4), np.uint8)
        for row, matcher in zip(bits, matchers, strict=True):
            matcher.fill(row)
        return bits

    @functools.cached_property
    def _tokens(self) -> int:
        """The larger of both vocabularies: some models have more logits than tokens, some tokenizers more tokens."""
        return max(self._vocab_size, int(max(self._tokenizer.get_vocab().values())) + 1)

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        import llguidance  # late: the import takes a tenth of a second, and few requests need it

        if len(grammar.text) > MAX_TEXT:
            raise InvalidValue(
                f"{grammar.field} has {len(grammar.text)} characters; at most {MAX_TEXT} are allowed",
                param=grammar.field,
            )
        environment = self._environment or self._build()
        try:
            source = _after(grammar.preamble, _source(grammar))
        except Exception as error:  # noqa: BLE001 - untrusted input: the converters raise anything
            raise _uncompilable(grammar, one_line(error)) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(environment, source, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask may take seconds. Copies share its caches, so no step has to wait for it.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _uncompilable(grammar, _message(matcher.get_error()))
        return GrammarMatcher(matcher)

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
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "choice" | "gbnf":
            return grammar_from(grammar.kind, grammar.text)


def _after(preamble: str, source: str) -> str:
    """A grammar that begins with the rules of `preamble`, in Lark, and continues with `source`."""
    if not preamble:
        return source
    language = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    whole = {"name": "whole", "lark_grammar": f"start: preamble @language\n{preamble}"}
    return json.dumps({"grammars": [whole, {**language[0], "name": "language"}, *language[1:]]})


def _uncompilable(grammar: Grammar, why: str) -> InvalidValue:
    return InvalidValue(f"{grammar.field} cannot be compiled: {why}", param=grammar.field)


def _message(error: str) -> str:
    """llguidance's message without the parser state that it appends."""
    return one_line(ValueError(error.partition("<non-verbose/>")[0].partition("<state>")[0]))
