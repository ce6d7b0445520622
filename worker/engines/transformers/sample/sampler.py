"""Logits to tokens: every row of a step at once, each by its own request's rules.

In this order: repetition penalty, presence and frequency penalties and logit bias, forbidden ends and grammars,
temperature, top-k, top-p, min-p, then one draw; where a request wants it so, temperature behind those three. They only
say which tokens stay; tokens as likely as the last one that stays, stay as well, so that no order among equals can
change an answer.

A draw is the inverse of the cumulative distribution, in the order of the vocabulary, at a number in [0, 1) that depends
on the sequence's seed and on the position alone: the same seed gives the same text whatever else is in the batch.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.sample import topk
from worker.engines.transformers.sample.device_to_host import Readout
from worker.engines.transformers.schedule.sequence import Repeats
from worker.interface import SamplingParams

COLDEST = 1e-6
"""Temperatures above 0 are taken as at least this: colder is greedy, and float32 cannot divide by less."""
COSTLIEST = SamplingParams(temperature=1e6, top_p=0.9, min_p=0.01, logprobs=20)
"""With this a request takes every step of the sampler, and the most memory: where all tokens are about as likely, all
of them are sorted."""
_NUCLEUS_TOKENS = 256
"""On the CPU top-p looks at so many likeliest tokens first: nearly always they are enough."""
_BINS, _BINS_PER_NAT = 2048, 64
"""Where they are not, tokens are gathered by score: down to e^-32 of the likeliest, and all below that in the last."""


@dataclass(frozen=True, slots=True)
class Pick:
    """How the next token of one row is to be chosen."""

    sampling: SamplingParams
    uniform: float = 0.0
    """In [0, 1): decides, unless the choice is greedy."""
    repeats: Repeats | None = None
    """What the penalties look back at, up to date; None where there are none."""
    forbidden: Sequence[int] = ()
    """Tokens that must not come now."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens the grammars of some rows allow now."""

    rows: Sequence[int]
    bits: NDArray[np.uint8]
    """uint8 `[len(rows), bytes]`: bit `i % 8` of byte `i // 8` is set if token i may come. At least a bit for each
    token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token's logprob in the unmodified distribution, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row. `likelihood` if its sampling asks for logprobs."""

    token: int
    likelihood: Likelihood | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position: 53 bits of BLAKE2b."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether what was said before changes what comes next."""
    changes = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(changes) and sampling.repeat_last_n != 0


class Drawn:
    """The next tokens of some rows, on the device; the host learns of them from the readout that they are part of."""

    def __init__(
        self, tokens: torch.Tensor, picks: Sequence[Pick], asking: Sequence[int], readout: Readout, place: int
    ):
        self.tokens = tokens
        """`[rows]`, int64. Some token of the vocabulary even where there was none to choose."""
        self._picks, self._asking, self._readout, self._place = picks, asking, readout, place

    def read(self) -> list[Sampled | None]:
        """What `sample` says, once the readout has been waited for."""
        picks, asking = self._picks, self._asking
        chosen, fits = list(map(int, self._readout[self._place])), self._readout[self._place + 1]
        told: dict[int, list[float]] = {}
        if asking:
            said = self._readout[self._place + 2]
            width = len(said) // len(asking)
            told = {row: said[place * width : (place + 1) * width] for place, row in enumerate(asking)}
        return [
            Sampled(chosen[row], _read(told[row], chosen[row], pick.sampling.logprobs) if row in told else None)
            if fits[row]
            else None
            for row, pick in enumerate(picks)
        ]


@torch.inference_mode()
def draw(logits: torch.Tensor, picks: Sequence[Pick], masks: Masks | None, readout: Readout) -> Drawn:
    """Choose the next token of each row of `logits` `[rows, vocab]` (float32; overwritten). Waits for no device."""
    asking = [row for row, pick in enumerate(picks) if pick.sampling.logprobs is not None]
    which = _indices(asking, logits.device)
    raw = torch.log_softmax(logits[which], dim=-1) if asking else None
    _edit(logits, picks)
    if masks is not None and masks.rows:
        _mask(logits, masks)
    if raw is not None:
        _tell_odds(raw, logits, picks, asking)
    best, tokens = topk.highest(logits)
    drawing = [row for row, pick in enumerate(picks) if pick.sampling.temperature > 0.0]
    if len(drawing) == len(picks):
        tokens = _draw(logits - best[:, None], picks)
    elif drawing:
        index = _indices(drawing, logits.device)
        tokens[index] = _draw(logits[index] - best[index, None], [picks[row] for row in drawing])
    place = readout.add(tokens.double())
    readout.add(best.isfinite().double())
    if raw is not None:
        top = max(picks[row].sampling.logprobs or 0 for row in asking)
        readout.add(_likelihoods(raw, tokens[which], top))
    return Drawn(tokens, picks, asking, readout, place)


def sample(logits: torch.Tensor, picks: Sequence[Pick], masks: Masks | None = None) -> list[Sampled | None]:
    """The next token of each row of `logits` `[rows, vocab]` (float32; overwritten).

    None for a row that has no token to choose: NaN or infinite logits, or every token forbidden. Waits once.
    """
    readout = Readout()
    drawn = draw(logits, picks, masks, readout)
    readout.send()
    readout.wait()
    return drawn.read()


class Told:
    """How likely some tokens were: part of a readout, as `Drawn` is."""

    def __init__(self, tokens: Sequence[int], top: int, readout: Readout, place: int):
        self._tokens, self._top, self._readout, self._place = tokens, top, readout, place

    def read(self) -> list[Likelihood]:
        """One for each token."""
        said, count = self._readout[self._place], len(self._tokens)
        width = len(said) // max(count, 1)
        rows = (said[row * width : (row + 1) * width] for row in range(count))
        return [_read(row, token, self._top) for row, token in zip(rows, self._tokens, strict=True)]


@torch.inference_mode()
def tell(logits: torch.Tensor, tokens: Sequence[int], top: int, readout: Readout) -> Told:
    """How likely each of `tokens` was, given `logits` `[tokens, vocab]`, with `top` alternatives each."""
    raw = torch.log_softmax(logits, dim=-1)
    return Told(tokens, top, readout, readout.add(_likelihoods(raw, _indices(tokens, logits.device), top)))


def likelihoods(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Likelihood]:
    """As `tell`. Waits once."""
    readout = Readout()
    told = tell(logits, tokens, top, readout)
    readout.send()
    readout.wait()
    return told.read()


def _edit(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    """Penalties, biases and forbidden tokens, in place: three scattered updates for the whole batch."""
    scale: list[tuple[int, int, float]] = []
    add: list[tuple[int, int, float]] = []
    for row, pick in enumerate(picks):
        sampling = pick.sampling
        if pick.repeats is not None:
            if sampling.repetition_penalty != 1.0:
                scale.extend((row, token, sampling.repetition_penalty) for token in pick.repeats.seen)
            if sampling.presence_penalty or sampling.frequency_penalty:
                add.extend(
                    (row, token, -(sampling.presence_penalty + sampling.frequency_penalty * count))
                    for token, count in pick.repeats.answer.items()
                )
        add.extend((row, token, bias) for token, bias in sampling.logit_bias.items())
        add.extend((row, token, -math.inf) for token in pick.forbidden if token < logits.shape[-1])
    if scale:
        rows, columns, factors = _columns(scale, logits.device)
        values = logits[rows, columns]
        logits[rows, columns] = torch.where(values > 0, values / factors, values * factors)
    if add:
        rows, columns, terms = _columns(add, logits.device)
        logits.index_put_((rows, columns), terms, accumulate=True)


def _mask(logits: torch.Tensor, masks: Masks) -> None:
    """Minus infinity, in place, wherever a bit is not set."""
    bias = penalties(masks.bits, logits.device)[:, : logits.shape[-1]]
    if len(masks.rows) == len(logits):
        logits.add_(bias)
    elif logits.device.type != "cpu":
        logits.index_add_(0, _indices(masks.rows, logits.device), bias)
    else:  # where it is three times as fast
        for row, each in zip(masks.rows, bias, strict=True):
            logits[row].add_(each)


def penalties(bits: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """For each packed bit 0 if it is set, else minus infinity: float32 `[rows, 8 * bytes]`.

    Only the packed form crosses to the device; there each byte looks up its eight. (Adding takes a third of the time
    of filling by a mask: 1.4 ms for 16 rows of 151,936 tokens on one core.)
    """
    packed = torch.from_numpy(bits)
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    table = _BITS.to(device, non_blocking=True)
    return torch.nn.functional.embedding(packed.int(), table).flatten(1)


_BITS = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) % 2 == 1, 0.0, -math.inf)
"""`penalties` of each byte, `[256, 8]`."""


def _columns(
    entries: list[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns, values = zip(*entries, strict=True)
    return _indices(rows, device), _indices(columns, device), _numbers(values, device)


def _draw(scores: torch.Tensor, picks: Sequence[Pick]) -> torch.Tensor:
    """Tokens `[rows]`; `scores` `[rows, vocab]` are logits with a maximum of 0 in each row, and are overwritten."""
    floor = _temper(scores, [pick.sampling for pick in picks])
    return topk.draw(scores, floor, _numbers([pick.uniform for pick in picks], scores.device))


def _temper(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Divide by the temperatures, in place. Returns the lowest score that stays then, `[rows]`; None if all stay."""
    heats = [(max(each.temperature, COLDEST), each.temperature_last) for each in samplings]
    scores /= _numbers([1.0 if is_last else heat for heat, is_last in heats], scores.device)[:, None]
    floor = _floor(scores, samplings)
    if not any(is_last for _, is_last in heats):
        return floor
    last = _numbers([heat if is_last else 1.0 for heat, is_last in heats], scores.device)
    scores /= last[:, None]
    return None if floor is None else floor / last


def _tell_odds(raw: torch.Tensor, logits: torch.Tensor, picks: Sequence[Pick], asking: Sequence[int]) -> None:
    """Write into those rows of `raw` `[asking, vocab]` that want it the logprobs of what `_draw` draws from; `logits`
    `[rows, vocab]` are all but tempered and cut. One by one: few ask, and nobody else's memory is taken."""
    for told, row in enumerate(asking):
        sampling = picks[row].sampling
        if sampling.post_sampling_logprobs:
            scores = logits[row : row + 1] - logits[row].max()
            floor = _temper(scores, [sampling])
            if sampling.temperature == 0.0:
                scores.masked_fill_(scores < 0.0, -math.inf)
            elif floor is not None:
                scores.masked_fill_(scores < floor[:, None], -math.inf)
            raw[told] = torch.log_softmax(scores[0], dim=-1)


def _floor(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The lowest score that stays, `[rows]`, by top-k, then top-p among those, then min-p; None if all stay."""
    vocab = scores.shape[-1]
    counts = [min(each.top_k, vocab) if each.top_k > 0 else vocab for each in samplings]
    cut = [row for row, each in enumerate(samplings) if counts[row] < vocab or each.top_p < 1.0]
    least = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in samplings]
    if not cut and max(least) == -math.inf:
        return None
    floor = _numbers(least, scores.device).clamp_(max=0.0)
    if cut:
        index = _indices(cut, scores.device)
        shares = [samplings[row].top_p for row in cut]
        floor[index] = torch.maximum(floor[index], _nucleus(scores[index], [counts[row] for row in cut], shares))
    return floor


def _nucleus(scores: torch.Tensor, counts: Sequence[int], shares: Sequence[float]) -> torch.Tensor:
    """The lowest score, `[rows]`, among the `counts` likeliest whose probabilities reach `shares` of theirs.

    A row that is not limited to fewer is looked at by its _NUCLEUS_TOKENS likeliest on the CPU, and by `_binned` if
    those do not reach; which of the two depends on the row alone, so that no row is changed by its company.
    """
    vocab = scores.shape[-1]
    limited = [count for count in counts if count < vocab]
    width = max(limited, default=1)
    if len(limited) < len(counts):
        width = min(vocab, max(_NUCLEUS_TOKENS, width)) if scores.device.type == "cpu" else vocab
    count = _indices(counts, scores.device)[:, None]
    share = _numbers(shares, scores.device)[:, None]
    top = topk.top(scores, width)  # [rows, width], falling
    rank = torch.arange(width, device=scores.device)
    weights = top.exp().masked_fill_(rank >= count, 0.0)
    total = weights.sum(-1, keepdim=True)
    if len(limited) < len(counts):
        total = torch.where(count < vocab, total, scores.exp().sum(-1, keepdim=True))
    stays = (rank < count) & ((share >= 1.0) | (weights.cumsum(-1) - weights < share * total))
    floor = top.gather(-1, (stays.sum(-1, keepdim=True) - 1).clamp_(min=0))[:, 0]
    if len(limited) < len(counts) and width < vocab:
        reached = (count < vocab) | (weights[:, :_NUCLEUS_TOKENS].sum(-1, keepdim=True) >= share * total)
        if not bool(reached.all()):
            rest = _indices([row for row, is_reached in enumerate(reached[:, 0]) if not is_reached], scores.device)
            floor[rest] = _binned(scores[rest], (share * total)[rest])
    return floor


def _binned(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The lowest score, `[rows]`, of the fewest likeliest tokens that have `mass` `[rows, 1]` together.

    Only the tokens around that score are sorted: those of one bin, by score, in which the sum of all likelier ones
    passes `mass`. A tenth of the time of sorting a vocabulary, or less.
    """
    bins = (scores * -_BINS_PER_NAT).nan_to_num_(0.0).clamp_(0, _BINS - 1).long()
    sums = scores.new_zeros(len(scores), _BINS).scatter_add_(1, bins, scores.exp())
    likelier = sums.cumsum(-1) - sums
    last = ((likelier < mass).sum(-1, keepdim=True) - 1).clamp_(min=0)
    inside = bins == last
    del bins
    counts = inside.sum(-1, keepdim=True)
    width = int(counts.max()) or scores.shape[-1]
    top = scores.where(inside, -math.inf).topk(width, dim=-1).values
    weights = top.exp()
    stays = likelier.gather(-1, last) + weights.cumsum(-1) - weights < mass
    places = torch.minimum(stays.sum(-1, keepdim=True), counts) - 1
    return top.gather(-1, places.clamp_(min=0))[:, 0]


def _likelihoods(raw: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """`[rows, 1 + 2 * top]`: the token's logprob, then the likeliest tokens, then their logprobs."""
    values, indices = raw.topk(min(top, raw.shape[-1]), dim=-1)
    return torch.cat((raw.gather(-1, tokens[:, None]).double(), indices.double(), values.double()), dim=-1)


def _read(row: list[float], token: int, top: int | None) -> Likelihood:
    half = (len(row) - 1) // 2
    pairs = zip(row[1 : 1 + half], row[1 + half :], strict=True)
    return Likelihood(token, row[0], tuple((int(index), value) for index, value in list(pairs)[: top or 0]))


def _numbers(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return upload(values, torch.float32, device)


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return upload(values, torch.int64, device)
