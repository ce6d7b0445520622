"""Whether the aligned backend is right for a model, tried at load on a few tokens with the model's own weights.

No list of names can say so for an architecture that nobody has looked at, nor for code of a repository's own. So two
short texts go through the cache as real ones would, in chunks, alone and together, and their logits are compared with
those of one forward without any cache.
"""

import torch

from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import Unsupported
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence

LONGEST = 10
"""Tokens of the longer text: a context has to have so many for a trial."""
_EXACT, _ROUNDED = 1e-2, 0.25
"""How far logits may differ, relative to how far they are from each other; in float32, and in types of 16 bits, where
the order of sums and the choice of experts may differ by rounding. A forgotten chunk or a wrong position makes 0.5 to
1.5 on random weights."""


def trial(runner: AlignedRunner) -> None:
    """Find out how `runner` has to be used for its model, and set it so. Rows 0 and 1 are void afterwards.

    Raises Unsupported if it never agrees with the model.
    """
    reason, may_mix = "", runner.mixes
    for continues in (True, False) if runner.has_states else (True,):
        for mixes in (True, False) if may_mix else (False,):
            runner.continues, runner.mixes = continues, mixes
            try:
                error, tolerance = _difference(runner)
            except (RuntimeError, ValueError, IndexError) as failure:
                if isinstance(failure, torch.OutOfMemoryError):
                    raise
                reason = f"{type(failure).__name__}: {failure}"
            else:
                if error <= tolerance:
                    return
                reason = f"logits differ by {error:.2f} of their spread"
            finally:
                runner.forget(0)
                runner.forget(1)
    raise Unsupported(f"a trial of its cache gave other text than the model alone ({reason})")


def _difference(runner: AlignedRunner) -> tuple[float, float]:
    """The largest relative difference of any position's logits, and what is tolerable for their type."""
    texts = [
        [(7 * i + 3) % runner.vocab_size for i in range(LONGEST)],
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

    step((long, 4))
    step((long, 4))
    step((long, 1), (short, 4)) if runner.rows > 1 else step((long, 1))
    step((long, 1), (short, 1)) if runner.rows > 1 else step((long, 1))
    worst = 0.0
    for text, sequence, logits in zip(texts, (long, short), found, strict=True):
        if logits:
            plain = runner.plainly(text, sequence.prompt_tokens)
            spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1)
            error = (torch.stack(logits) - plain).norm(dim=-1) / spread.clamp_min(1e-9)
            worst = max(worst, float(error.max()))
    return worst, _EXACT if runner.dtype == torch.float32 else _ROUNDED


def _sequence(row: int, text: list[int], prompt_tokens: int) -> Sequence:
    return Sequence(id=row, prompt_tokens=prompt_tokens, tokens=text[:prompt_tokens], limit=len(text), ends=frozenset())
