"""Self-check of the aligned backend, at load, on a few tokens with the model's own weights.

A list of architectures cannot vouch for an unknown one or for custom code. So two short texts go through the cache as
requests would, in chunks, alone and together. Their logits are compared with a single forward without a cache.
"""

import math

import torch

from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import UnsupportedCache
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence

CHECK_TOKENS = 10  # tokens of the longer text, and the least context for which the check runs
# Tolerated difference of logits relative to their spread, in float32 and in 16-bit types. There, the order of sums and
# the choice of experts may differ by rounding. A lost chunk or a wrong position gives 0.5 to 1.5 on random weights.
_EXACT, _ROUNDED = 1e-2, 0.25
# A lost state gives only 0.1 to 0.2, where tokens are soon forgotten. With the settings that lose none, rounding gives
# at most 0.02 (bfloat16), which is measured. A multiple of it is tolerated.
_TIMES_ROUNDING = 3.0


def check(runner: AlignedRunner) -> None:
    """Find the settings of `runner` with which it agrees with its model, and keep them. Clears rows 0 and 1.

    Raises UnsupportedCache if it never agrees.
    """
    reason, may_mix = "", runner.mixes_lengths
    tolerance = _EXACT if runner.dtype == torch.float32 else _ROUNDED
    if tolerance == _ROUNDED and runner.has_states:
        error, _ = _error(runner, continues_states=False, mixes_lengths=False)
        tolerance = min(tolerance, max(_EXACT, _TIMES_ROUNDING * error))
    # The fastest settings first.
    for continues_states in (True, False) if runner.has_states else (True,):
        for mixes_lengths in (True, False) if may_mix else (False,):
            error, reason = _error(runner, continues_states=continues_states, mixes_lengths=mixes_lengths)
            if error <= tolerance:
                return
    raise UnsupportedCache(f"its self-check failed: the cache gives other text than the model alone ({reason})")


def _error(runner: AlignedRunner, *, continues_states: bool, mixes_lengths: bool) -> tuple[float, str]:
    """The largest relative difference of logits with these settings, infinite if they fail; and the reason to reject
    them."""
    runner.continues_states, runner.mixes_lengths = continues_states, mixes_lengths
    try:
        error = _difference(runner)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as failure:
        return math.inf, f"{type(failure).__name__}: {failure}"
    finally:
        runner.forget(0)
        runner.forget(1)
    return error, f"logits differ by {error:.2f} of their spread"


def _difference(runner: AlignedRunner) -> float:
    """The largest difference of logits at any position, relative to their spread."""
    texts = [
        [(7 * i + 3) % runner.vocab_size for i in range(CHECK_TOKENS)],
        [(5 * i + 4) % runner.vocab_size for i in range(5)],
    ]
    long, short = (_sequence(row, text, prompt) for row, (text, prompt) in enumerate(zip(texts, (8, 4), strict=True)))
    found: list[list[torch.Tensor]] = [[], []]

    def step(*parts: tuple[Sequence, int]) -> None:
        batch = tuple(Segment(sequence, sequence.id, sequence.computed, length) for sequence, length in parts)
        logits = iter(runner.run(batch))
        for segment in batch:
            sequence = segment.sequence
            sequence.computed = segment.end
            if segment.logits:
                found[sequence.id].append(next(logits))
                sequence.tokens.extend(texts[sequence.id][segment.end : segment.end + 1])

    # Two chunks of a prompt, a decode step beside another prompt, and a decode step of rows of different lengths. The
    # second chunk is short, so that a state that was lost before it is not forgotten at its end.
    step((long, 6))
    step((long, 2))
    step((long, 1), (short, 4)) if runner.rows > 1 else step((long, 1))
    step((long, 1), (short, 1)) if runner.rows > 1 else step((long, 1))
    worst = 0.0
    for text, sequence, logits in zip(texts, (long, short), found, strict=True):
        if logits:
            plain = runner.forward_without_cache(text, sequence.prompt_tokens)
            spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1)
            error = (torch.stack(logits) - plain).norm(dim=-1) / spread.clamp_min(1e-9)
            worst = max(worst, float(error.max()))
    return worst


def _sequence(row: int, text: list[int], prompt_tokens: int) -> Sequence:
    return Sequence(id=row, prompt_tokens=prompt_tokens, tokens=text[:prompt_tokens], limit=len(text), ends=frozenset())
