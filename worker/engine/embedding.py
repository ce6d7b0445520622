"""Prompts to vectors: hidden states of a whole batch, pooled to one vector for each prompt.

Which pooling a model wants, sentence-transformers' layout says (`modules.json`, `1_Pooling/config.json`).
"""

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from worker.contract import Exit
from worker.engine import memory
from worker.engine.steploop import Outbox, Report
from worker.errors import RequestError, SequenceFailed, StartError

log = logging.getLogger(__name__)

WASTE = 0.1
"""Of a batch's tokens, at most this part may be padding."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def resolve_pooling(asked: str, snapshot: Path) -> str:
    """mean, cls or last: as asked, else as the snapshot says, else mean. Raises StartError for anything else."""
    if asked in ("mean", "cls", "last"):
        return asked
    if asked == "none":
        raise StartError(
            "pooling = none gives a vector for each token, which /v1/embeddings cannot say; use mean, cls or last"
        )
    if asked:
        raise StartError(f"pooling {asked!r} is none of mean, cls, last", Exit.USAGE)
    modules = _read(snapshot / "modules.json", [])
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in _KNOWN_MODULES]
    if unknown:
        raise StartError(f"{snapshot / 'modules.json'} has a module {unknown[0]!r}, which this version cannot apply")
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            return _mode(snapshot / str(module.get("path", "1_Pooling")) / "config.json")
    return "mean"


def _mode(path: Path) -> str:
    config = _read(path, {})
    wanted = [key for key, value in config.items() if key.startswith("pooling_mode") and value is True]
    if isinstance(config.get("pooling_mode"), str):
        wanted.append(config["pooling_mode"])
    modes: set[str] = {_MODES.get(key, {"lasttoken": "last"}.get(key, key)) for key in wanted} or {"mean"}
    mode = modes.pop()
    if modes or mode not in _MODES.values():
        raise StartError(f"{path} asks for pooling by {', '.join(wanted)}; only one of mean, cls, last is supported")
    return mode


def longest_input(snapshot: Path) -> int:
    """Tokens that sentence-transformers' settings allow; 0: they do not say."""
    return int(_read(snapshot / "sentence_bert_config.json", {}).get("max_seq_length") or 0)


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise StartError(f"{path} is damaged: {error}", Exit.DAMAGED) from error
    if not isinstance(value, type(default)):
        raise StartError(f"{path} is damaged: it holds no {type(default).__name__}", Exit.DAMAGED)
    return value


def choose(lengths: Sequence[int], budget: int, rows: int) -> list[int]:
    """Indices of the next batch: the oldest (0), and those whose length is near enough to its own.

    At most `rows`, at most `budget` tokens with padding (the oldest alone may exceed it), at most WASTE of it padding.
    """
    chosen, tokens, longest = [0], lengths[0], lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda each: abs(lengths[each] - lengths[0])):
        most = max(longest, lengths[index])
        padded = (len(chosen) + 1) * most
        if len(chosen) < rows and padded <= budget and tokens + lengths[index] >= (1 - WASTE) * padded:
            chosen.append(index)
            tokens, longest = tokens + lengths[index], most
    return sorted(chosen)


class Embedder:
    """A model whose last hidden states become vectors."""

    def __init__(self, model: Any, device: torch.device, *, pooling: str, normalize: int, pad: int):
        self._model, self._device = model, device
        self._pooling, self._normalize, self._pad = pooling, normalize, pad

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """One vector for each prompt; padding on the right is masked, so company changes nothing."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        longest = max(map(len, prompts))
        tokens = [[*prompt, *[self._pad] * (longest - len(prompt))] for prompt in prompts]
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        output = self._model(
            input_ids=torch.tensor(tokens, device=self._device),
            attention_mask=mask.long(),
            **({"use_cache": False} if getattr(self._model.config, "use_cache", False) else {}),
        )
        vectors = pool(output.last_hidden_state.float(), mask, self._pooling)
        found: list[list[float]] = normalized(vectors, self._normalize).tolist()
        return found


def pool(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """`hidden` `[prompts, tokens, width]`, `mask` `[prompts, tokens]` (true: a token) to `[prompts, width]`."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def normalized(vectors: torch.Tensor, norm: int) -> torch.Tensor:
    """As llama-server's --embd-normalize: -1 none, 0 largest magnitude to 32760, else the p-norm (2: Euclidean)."""
    if norm < 0:
        return vectors
    if norm == 0:
        return vectors * (32760.0 / vectors.abs().amax(-1, keepdim=True).clamp(min=1e-12))
    length: torch.Tensor = torch.linalg.vector_norm(vectors, norm, dim=-1, keepdim=True)
    return vectors / length.clamp(min=1e-12)


@dataclass(eq=False)
class Job:
    """One request's prompts, and where their vectors go."""

    prompts: Sequence[Sequence[int]]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[list[list[float]]]
    vectors: dict[int, list[float]] = field(default_factory=dict)


class Embedding:
    """The engine's `Work` for vectors. Methods run on the step loop's thread unless they say otherwise."""

    def __init__(self, embedder: Embedder, outbox: Outbox, *, rows: int, budget: int):
        """One step takes at most `rows` prompts and `budget` tokens, padding included, or one prompt."""
        self._embedder, self._outbox = embedder, outbox
        self._rows, self._budget = rows, budget
        self._waiting: list[tuple[Job, int]] = []
        self._running = 0
        self._tokens = 0
        self._live = 0
        self._lock = threading.Lock()

    def admit(self, most: int) -> bool:
        """Count one more request in, unless `most` are here already. From any thread."""
        with self._lock:
            if self._live >= most:
                return False
            self._live += 1
            return True

    def add(self, job: Job) -> None:
        self._waiting.extend((job, index) for index in range(len(job.prompts)))

    def release(self) -> None:
        """One request less counts. From any thread."""
        with self._lock:
            self._live -= 1

    def cancel(self, job: Job) -> None:
        """Its prompts are out of the next step."""
        self._waiting = [each for each in self._waiting if each[0] is not job]

    def abandon(self, error: RequestError) -> None:
        for job in {job for job, _ in self._waiting}:
            self._fail(job, error)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def load(self) -> tuple[int, int]:
        return self._running, len(self._waiting) - self._running

    def report(self) -> Report:
        return Report(parallel=self._rows, prefill_tokens=self._tokens)

    def step(self) -> None:
        lengths = [len(job.prompts[index]) for job, index in self._waiting]
        batch = [self._waiting[each] for each in choose(lengths, self._budget, self._rows)]
        self._running = len(batch)
        for job, index, vector in self._compute(batch):
            job.vectors[index] = vector
            self._tokens += len(job.prompts[index])
            if len(job.vectors) == len(job.prompts):
                self._answer(job)
        taken = set(map(id, batch))
        self._waiting = [each for each in self._waiting if id(each) not in taken]
        self._running = 0

    def _compute(self, batch: list[tuple[Job, int]]) -> list[tuple[Job, int, list[float]]]:
        """If a batch fails, each prompt alone: whoever fails then, ends its request."""
        try:
            vectors = self._embedder.run([job.prompts[index] for job, index in batch])
            return [(job, index, vector) for (job, index), vector in zip(batch, vectors, strict=True)]
        except Exception as error:
            if memory.is_sticky(error):
                raise
            if len(batch) > 1:
                return [found for each in batch for found in self._compute([each])]
            log.exception("an embedding failed in its step")
            self._fail(batch[0][0], SequenceFailed(f"the model failed on this text: {type(error).__name__}"))
            return []

    def _answer(self, job: Job) -> None:
        vectors = [job.vectors[index] for index in range(len(job.prompts))]
        self._outbox.put(job.loop, partial(_settle, job.answer, vectors))

    def _fail(self, job: Job, error: RequestError) -> None:
        self._waiting = [each for each in self._waiting if each[0] is not job]
        self._outbox.put(job.loop, partial(_settle, job.answer, error))


def _settle(answer: asyncio.Future[list[list[float]]], outcome: list[list[float]] | RequestError) -> None:
    if answer.done():
        return  # its reader is gone
    if isinstance(outcome, RequestError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
