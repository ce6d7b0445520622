"""The sampler: from logits to tokens, for all rows of a step at once, each by its own request's settings.

Order: repetition penalty; presence and frequency penalties and logit bias; forbidden tokens and grammars; temperature;
top-k; top-p; min-p; one draw. With `temperature_last`, temperature follows min-p, as in llama.cpp. The three filters
only set the lowest score that stays. Tokens with an equal score stay too, so that the order of equal tokens, which
differs between sort algorithms, cannot change an answer.

A draw inverts the cumulative distribution, in the order of the vocabulary, at a number in [0, 1) that depends only on
the sequence's seed and position. The same seed therefore gives the same text, whatever else is in the batch.
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
from worker.engines.transformers.sample.device_to_host import DeviceToHost
from worker.engines.transformers.schedule.sequence import PenaltyCounts
from worker.interface import SamplingParams

# Addend for the logit of a forced token. No logit is near it, and float32 can divide it by MIN_TEMPERATURE.
_FORCED = 1e9
# The least temperature above 0: a colder draw is greedy, and float32 cannot divide by less.
MIN_TEMPERATURE = 1e-6
# Settings that use every step of the sampler and the most memory: all tokens are about equally likely, so all of them
# are sorted. For warmup and estimates.
COSTLIEST_SAMPLING = SamplingParams(temperature=1e6, top_p=0.9, min_p=0.01, logprobs=20)
_NUCLEUS_TOKENS = 256  # likeliest tokens that top-p looks at first on the CPU: almost always enough
# If not enough, tokens are binned by score: 64 bins per nat, down to e^-32 of the likeliest, the rest in the last bin.
_BINS, _BINS_PER_NAT = 2048, 64


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The settings for the next token of one row."""

    sampling: SamplingParams
    uniform: float = 0.0  # in [0, 1): the random number of the draw; unused if greedy
    penalty_counts: PenaltyCounts | None = None  # tokens that the penalties count, up to date; None without penalties
    forbidden: Sequence[int] = ()  # tokens that must not be chosen now
    forced: int | None = None  # the token that is chosen now, unless it is forbidden, by a grammar or in `forbidden`


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that the grammars of some rows allow now."""

    rows: Sequence[int]
    # uint8 `[len(rows), bytes]`: bit `i % 8` of byte `i // 8` is set if token i is allowed. At least one bit for each
    # token of the vocabulary.
    bits: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token's logprob in the unmodified distribution, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row, with its `likelihood` if the request asks for logprobs."""

    token: int
    likelihood: Likelihood | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position: 53 bits of BLAKE2b, which is as many as a float64 holds."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def has_penalties(sampling: SamplingParams) -> bool:
    """True if earlier tokens of the sequence change the next one."""
    changes = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(changes) and sampling.repeat_last_n != 0


def copies_of_scores(sampling: SamplingParams) -> int:
    """A measure of the main memory that the choice of a token takes: its logits, their draw, filters and logprobs."""
    is_drawn = sampling.temperature > 0.0
    is_filtered = is_drawn and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)
    return 1 + is_drawn + is_filtered + (sampling.logprobs is not None)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The next tokens of some rows, on the device. Their values reach the host with the step's `DeviceToHost`."""

    tokens: torch.Tensor  # [rows], int64; an arbitrary token of the vocabulary for a row without any to choose
    picks: Sequence[RowSampling]
    asking: Sequence[int]  # rows with logprobs
    to_host: DeviceToHost
    place: int  # index of the tokens in `to_host`; their logits and the logprobs follow

    def read(self) -> list[Sampled | None]:
        """The sampled tokens, as from `sample`, after the copy to the host has been waited for."""
        chosen, best = list(map(int, self.to_host[self.place])), self.to_host[self.place + 1]
        likelihoods: dict[int, Likelihood] = {}
        if self.asking:
            values = self.to_host[self.place + 2]
            width = len(values) // len(self.asking)
            for place, row in enumerate(self.asking):
                numbers = values[place * width : (place + 1) * width]
                likelihoods[row] = _read(numbers, chosen[row], self.picks[row].sampling.logprobs)
        return [
            Sampled(token, likelihoods.get(row)) if math.isfinite(best[row]) else None
            for row, token in enumerate(chosen)
        ]

    def is_nan(self, row: int) -> bool:
        """True if the row had NaN among its logits. False if every token was forbidden."""
        return math.isnan(self.to_host[self.place + 1][row])


@torch.inference_mode()
def draw(
    logits: torch.Tensor, picks: Sequence[RowSampling], masks: TokenMasks | None, to_host: DeviceToHost
) -> DrawnTokens:
    """Choose the next token of each row of `logits` `[rows, vocab]` (float32; overwritten). Does not wait."""
    asking = [row for row, pick in enumerate(picks) if pick.sampling.logprobs is not None]
    which = upload(asking, logits.device)
    # Logprobs are of the unmodified distribution, so they are taken before the penalties. [asking, vocab]
    raw = torch.log_softmax(logits[which], dim=-1) if asking else None
    _apply_penalties(logits, picks)
    if masks is not None and masks.rows:
        _mask(logits, masks)
    if raw is not None:
        _write_drawn_logprobs(raw, logits, picks, asking)
    best, tokens = topk.highest(logits)
    drawing = [row for row, pick in enumerate(picks) if pick.sampling.temperature > 0.0]
    if len(drawing) == len(picks):
        tokens = _draw(logits - best[:, None], picks)
    elif drawing:
        index = upload(drawing, logits.device)
        tokens[index] = _draw(logits[index] - best[index, None], [picks[row] for row in drawing])
    place = to_host.add(tokens.double())
    to_host.add(best.double())
    if raw is not None:
        top = max(picks[row].sampling.logprobs or 0 for row in asking)
        to_host.add(_likelihoods(raw, tokens[which], top))
    return DrawnTokens(tokens, picks, asking, to_host, place)


def sample(logits: torch.Tensor, picks: Sequence[RowSampling], masks: TokenMasks | None = None) -> list[Sampled | None]:
    """The next token of each row of `logits` `[rows, vocab]` (float32; overwritten). Waits once.

    None for a row without a token to choose: NaN or infinite logits, or every token forbidden.
    """
    to_host = DeviceToHost()
    drawn = draw(logits, picks, masks, to_host)
    to_host.send(logits.device)
    to_host.wait()
    return drawn.read()


@dataclass(frozen=True, slots=True)
class TokenLikelihoods:
    """Likelihoods of given tokens. Their values reach the host with the step's `DeviceToHost`."""

    tokens: Sequence[int]
    top: int
    to_host: DeviceToHost
    place: int

    def read(self) -> list[Likelihood]:
        """One likelihood for each token."""
        values = self.to_host[self.place]
        width = len(values) // max(len(self.tokens), 1)
        return [
            _read(values[row * width : (row + 1) * width], token, self.top) for row, token in enumerate(self.tokens)
        ]


@torch.inference_mode()
def gather_likelihoods(
    logits: torch.Tensor, tokens: Sequence[int], top: int, to_host: DeviceToHost
) -> TokenLikelihoods:
    """Likelihoods of `tokens`, given `logits` `[tokens, vocab]`, each with its `top` likeliest alternatives."""
    raw = torch.log_softmax(logits, dim=-1)
    return TokenLikelihoods(tokens, top, to_host, to_host.add(_likelihoods(raw, upload(tokens, logits.device), top)))


def likelihoods(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Likelihood]:
    """As `gather_likelihoods`, but waits for the result."""
    to_host = DeviceToHost()
    found = gather_likelihoods(logits, tokens, top, to_host)
    to_host.send(logits.device)
    to_host.wait()
    return found.read()


def _apply_penalties(logits: torch.Tensor, picks: Sequence[RowSampling]) -> None:
    """Apply penalties, biases and forbidden tokens in place: a few scattered updates for the whole batch.

    Dense `[rows, vocab]` tensors instead would cost more than the rest of the sampler.
    """
    scale: list[tuple[int, int, float]] = []
    add: list[tuple[int, int, float]] = []
    for row, pick in enumerate(picks):
        sampling = pick.sampling
        if pick.penalty_counts is not None:
            if sampling.repetition_penalty != 1.0:
                scale.extend((row, token, sampling.repetition_penalty) for token in pick.penalty_counts.seen)
            if sampling.presence_penalty or sampling.frequency_penalty:
                add.extend(
                    (row, token, -(sampling.presence_penalty + sampling.frequency_penalty * count))
                    for token, count in pick.penalty_counts.output.items()
                )
        add.extend((row, token, bias) for token, bias in sampling.logit_bias.items())
        add.extend((row, token, -math.inf) for token in pick.forbidden if token < logits.shape[-1])
        if pick.forced is not None:
            add.append((row, pick.forced, _FORCED))
    if scale:
        rows, columns, factors = _columns(scale, logits.device)
        # Division would raise a negative logit, so that the token became more likely (Keskar et al. 2019, as in
        # transformers). No pair occurs twice here, so a plain assignment is enough.
        values = logits[rows, columns]
        logits[rows, columns] = torch.where(values > 0, values / factors, values * factors)
    if add:  # a token may have a penalty and a bias, so pairs may occur twice: accumulate
        rows, columns, terms = _columns(add, logits.device)
        logits.index_put_((rows, columns), terms, accumulate=True)


def _mask(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Set logits to minus infinity, in place, for tokens whose bit is not set."""
    bias = mask_bias(masks.bits, logits.device)[:, : logits.shape[-1]]
    if len(masks.rows) == len(logits):
        logits.add_(bias)
    elif logits.device.type != "cpu":
        logits.index_add_(0, upload(masks.rows, logits.device), bias)
    else:  # on the CPU row by row is three times as fast as index_add_
        for row, row_bias in zip(masks.rows, bias, strict=True):
            logits[row].add_(row_bias)


def mask_bias(bits: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Addends for logits: 0 for each set bit, else minus infinity. Float32 `[rows, 8 * bytes]`.

    Only the packed bits are copied to the device, where each byte looks up its eight addends. Adding takes a third of
    the time of filling by a mask: 1.4 ms for 16 rows of 151,936 tokens on one core.
    """
    packed = torch.from_numpy(bits)
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    table = _BITS.to(device, non_blocking=True)
    return torch.nn.functional.embedding(packed.int(), table).flatten(1)


# `mask_bias` of each byte, [256, 8].
_BITS = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) % 2 == 1, 0.0, -math.inf)


def _columns(
    entries: list[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows, columns and values of `entries` as tensors `[entries]` on `device`."""
    rows, columns, values = zip(*entries, strict=True)
    return upload(rows, device), upload(columns, device), upload(values, device, torch.float32)


def _draw(scores: torch.Tensor, picks: Sequence[RowSampling]) -> torch.Tensor:
    """Draw tokens `[rows]`. `scores` `[rows, vocab]`: logits with a maximum of 0 in each row; overwritten."""
    floor = _temper(scores, [pick.sampling for pick in picks])
    return topk.draw(scores, floor, upload([pick.uniform for pick in picks], scores.device, torch.float32))


def _temper(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Divide by the temperatures in place. Return the lowest score that stays, `[rows]`; None if all stay."""
    heats = [(max(sampling.temperature, MIN_TEMPERATURE), sampling.temperature_last) for sampling in samplings]
    scores /= upload([1.0 if is_last else heat for heat, is_last in heats], scores.device, torch.float32)[:, None]
    floor = _floor(scores, samplings)
    if not any(is_last for _, is_last in heats):
        return floor
    last = upload([heat if is_last else 1.0 for heat, is_last in heats], scores.device, torch.float32)
    scores /= last[:, None]
    return None if floor is None else floor / last


def _write_drawn_logprobs(
    raw: torch.Tensor, logits: torch.Tensor, picks: Sequence[RowSampling], asking: Sequence[int]
) -> None:
    """Write the logprobs of the distribution that `_draw` uses into the rows of `raw` `[asking, vocab]`.

    `logits` `[rows, vocab]`: before temperature and filters. Row by row, because few requests ask for it and a batch
    would need another `[rows, vocab]` of memory.
    """
    for index, row in enumerate(asking):
        sampling = picks[row].sampling
        if sampling.post_sampling_logprobs:
            scores = logits[row : row + 1] - logits[row].max()
            floor = _temper(scores, [sampling])
            if sampling.temperature == 0.0:
                scores.masked_fill_(scores < 0.0, -math.inf)
            elif floor is not None:
                scores.masked_fill_(scores < floor[:, None], -math.inf)
            raw[index] = torch.log_softmax(scores[0], dim=-1)


def _floor(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The lowest score that stays, `[rows]`, after top-k, top-p among those, and min-p. None if all stay."""
    vocab = scores.shape[-1]
    counts = [min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab for sampling in samplings]
    cut = [row for row, sampling in enumerate(samplings) if counts[row] < vocab or sampling.top_p < 1.0]
    least = [math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf for sampling in samplings]
    if not cut and max(least) == -math.inf:
        return None
    floor = upload(least, scores.device, torch.float32).clamp_(max=0.0)
    if cut:
        index = upload(cut, scores.device)
        shares = [samplings[row].top_p for row in cut]
        floor[index] = torch.maximum(floor[index], _nucleus(scores[index], [counts[row] for row in cut], shares))
    return floor


def _nucleus(scores: torch.Tensor, counts: Sequence[int], shares: Sequence[float]) -> torch.Tensor:
    """The lowest score `[rows]` of the nucleus: of the `counts` likeliest tokens, the fewest with `shares` of the mass.

    On the CPU, a row without top-k is first tried with its _NUCLEUS_TOKENS likeliest, then with `_binned`. The choice
    depends on the row alone, so that other rows of the batch cannot change its result by rounding.
    """
    vocab = scores.shape[-1]
    limited = [count for count in counts if count < vocab]
    width = max(limited, default=1)
    if len(limited) < len(counts):
        width = min(vocab, max(_NUCLEUS_TOKENS, width)) if scores.device.type == "cpu" else vocab
    count = upload(counts, scores.device)[:, None]
    share = upload(shares, scores.device, torch.float32)[:, None]
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
            rest = upload([row for row, is_reached in enumerate(reached[:, 0]) if not is_reached], scores.device)
            floor[rest] = _binned(scores[rest], (share * total)[rest])
    return floor


def _binned(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The lowest score, `[rows]`, of the fewest likeliest tokens that have `mass` `[rows, 1]` together.

    Tokens are binned by score, and only the bin in which the cumulative sum passes `mass` is sorted. This takes at
    most a tenth of the time of sorting the vocabulary.
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
    """The likelihood of `token` from a row of `_likelihoods`, which may have more than `top` tokens."""
    half = (len(row) - 1) // 2
    pairs = zip(row[1 : 1 + half], row[1 + half :], strict=True)
    return Likelihood(token, row[0], tuple((int(index), value) for index, value in list(pairs)[: top or 0]))
