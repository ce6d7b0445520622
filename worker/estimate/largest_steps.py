"""The largest steps that the engine can take: the steps whose peak memory the exact estimate traces."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers import load_encoder
from worker.engines.transformers.attention import cpu_attention, cpu_linear
from worker.engines.transformers.load import sentence_transformers_config
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cuda_graphs import GraphRunner
from worker.engines.transformers.run.pooling import Encoder
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.sample import sampler
from worker.engines.transformers.schedule.kv_cache import BlockTable, RowAllocator
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.estimate.memory_tracer import Step, live_bytes, peak_bytes
from worker.interface import EncoderInput, PromptImage, PromptImages
from worker.protocol.argv import ModelOptions
from worker.protocol.memory import DRAFT_LOGITS, GRAPH_BYTES, PROMPT_LOGITS

CPU = torch.device("cpu")

# Some models with states (Mamba, Jamba) compute a prompt by a loop over its tokens, at 0.1 ms of CPU time for each
# operator on fake tensors. A chunk of more operators than this is traced in part, as TRACED_TOKENS tokens at most.
MAX_OPERATORS = 6000
TRACED_TOKENS = 64

# A name that is no attention implementation of transformers. It builds no mask for such a name. A text
# without padding needs none, but transformers cannot see in a fake tensor that there is no padding.
UNMASKED = "unmasked_sdpa"


@dataclass(frozen=True)
class GenerationSteps:
    """The largest steps of a model that generates. Every other row applies `adapter`."""

    runner: PagedRunner | AlignedRunner
    capacity: RowAllocator
    options: ModelOptions
    ctx_size: int
    adapter: AppliedAdapter | None = None

    @property
    def _chunk(self) -> int:
        return min(self.options.prefill_chunk, self.ctx_size)

    @property
    def _is_encoder_decoder(self) -> bool:
        return isinstance(self.runner, AlignedRunner) and self.runner.is_encoder_decoder

    def largest(self) -> Iterator[Step]:
        """Yield steps with a prompt chunk at the far end of the context beside decoding rows, with all rows decoding,
        and with logprobs of the prompt."""
        rows, chunk = self.capacity.rows, self._chunk
        has_states = isinstance(self.runner, AlignedRunner) and self.runner.has_states
        # A chunk at the far end of the context attends to the most keys. All rows decoding need the most logits, which
        # decides where the vocabulary outweighs the layers.
        last = self.segment(rows - 1, self.ctx_size - chunk, chunk)
        yield self.step(*self.drafts(rows - 1), last)
        yield self.step(*self.drafts(rows))
        if self._is_encoder_decoder:
            return  # the encoder has read the whole prompt in the first step, and there are no logprobs of it
        if has_states:  # a chunk that begins a prompt needs the largest states
            yield self.step(*self.decodes(rows - 1), self.segment(rows - 1, 0, chunk))
        asked = min(PROMPT_LOGITS, chunk)
        end = asked if has_states else self.ctx_size
        with_logprobs = self.segment(rows - 1, end - asked, asked, prompt_logprobs=True)
        if rows > 1 and chunk > asked:
            rest = chunk - asked
            begin = 0 if has_states else self.ctx_size - rest
            yield self.step(*self.drafts(rows - 2), self.segment(rows - 2, begin, rest), with_logprobs)
        else:
            yield self.step(*self.drafts(rows - 1), with_logprobs)

    def short_rows(self, heads: int) -> Iterator[Step]:
        """Yield steps of rows that attend jointly on the CPU, at the longest length for which they do, alone and beside
        a prompt chunk. `heads`: of queries."""
        assert isinstance(self.runner, PagedRunner)
        rows, chunk = self.capacity.rows, self._chunk
        last = self.segment(rows - 1, self.ctx_size - chunk, chunk)
        for count, beside in ((rows - 1, (last,)), (rows, ())):
            short = min(self.ctx_size, cpu_attention.max_tokens(count, heads, self.runner.pool.keys[0]))
            if short:
                yield self.step(*self.decodes(count, ctx_size=short), *beside)

    def costly_lengths(self, layers: cpu_linear.CpuLinears) -> Iterator[tuple[int, Step]]:
        """Yield chunks at the far end of the context, of the numbers of tokens for which the linear `layers` need the
        most memory, with an upper bound on the bytes that this adds. An encoder reads whole prompts instead."""
        rows, chunk = self.capacity.rows, self._chunk
        # Tokens in the same forward.
        beside = sum(part.length for part in self.drafts(rows - 1)) if isinstance(self.runner, PagedRunner) else 0
        longest = self.ctx_size if self._is_encoder_decoder else beside + chunk
        for count, extra in layers.peak_row_counts(longest).items():
            end = count if self._is_encoder_decoder else self.ctx_size
            length = min(chunk, end) if self._is_encoder_decoder else count - beside
            if length > 0:
                yield extra, self.step(*self.drafts(rows - 1), self.segment(rows - 1, end - length, length))

    def with_image(self, largest: tuple[PromptImage, int] | None) -> Iterator[Step]:
        """Yield a chunk that begins with the `largest` image, beside decoding rows and the features of their images."""
        if largest is None:
            return
        picture, runner, rows = largest[0], self.runner, self.capacity.rows
        assert isinstance(runner, AlignedRunner)
        inputs = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in picture.inputs.items()}
        first = self.segment(rows - 1, 0, min(self._chunk, picture.end))
        first.sequence.tokens, first.sequence.prompt_tokens = [0] * self.ctx_size, self.ctx_size
        first.sequence.prompt_images = PromptImages((PromptImage(picture.runs, inputs, picture.is_whole),))

        def step() -> None:
            held = [torch.empty(picture.tokens, runner.hidden, dtype=runner.dtype) for _ in range(rows - 1)]
            generate(runner, (*self.decodes(rows - 1), first))
            del held

        yield step

    def chunk_alone(self, length: int, *, at_end: bool) -> Step:
        """Return a step with one prompt chunk of `length` tokens, at the end of the context or at its start."""
        return self.step(self.segment(self.capacity.rows - 1, self.ctx_size - length if at_end else 0, length))

    def step(self, *batch: Segment) -> Step:
        return partial(generate, self.runner, batch)

    def decodes(self, count: int, ctx_size: int = 0) -> tuple[Segment, ...]:
        """Return `count` decoding rows of different lengths near the end of the context."""
        end = (ctx_size or self.ctx_size) - 1
        return tuple(self.segment(row, max(end - row, 0), 1, adapts=row % 2 == 1) for row in range(count))

    def drafts(self, count: int) -> tuple[Segment, ...]:
        """Return `decodes`, with the longest drafts that the options allow."""
        length = min(self.options.draft_max, DRAFT_LOGITS // max(count, 1), self.ctx_size - 2)
        has_states = isinstance(self.runner, AlignedRunner) and self.runner.has_states  # then nothing is drafted
        if has_states or not (self.options.speculates and length):
            return self.decodes(count)
        return tuple(
            self.segment(row, max(self.ctx_size - 1 - row - length, 1), 1 + length, adapts=row % 2 == 1, drafted=length)
            for row in range(count)
        )

    def segment(
        self,
        row: int,
        start: int,
        length: int,
        *,
        prompt_logprobs: bool = False,
        adapts: bool = True,
        drafted: int = 0,
    ) -> Segment:
        """Return the part of a batch that computes `length` tokens of a row from position `start`, the last ones of
        which may be `drafted`."""
        tokens = [0] * (start + length - drafted)
        is_prompt = prompt_logprobs or length - drafted > 1
        sequence = Sequence(
            id=row,
            prompt_tokens=len(tokens) if is_prompt else max(start, 1),
            tokens=tokens,
            limit=len(tokens),
            ends=frozenset(),
            prompt_logprobs=prompt_logprobs,
            adapter=self.adapter if adapts else None,
            computed=start,
        )
        table = self.capacity.contiguous_table(row, start + length)
        if table is not None and length > 1:
            table = _in_two_runs(table)
        return Segment(sequence, row, start, length, table, drafted=(0,) * drafted)


def _in_two_runs(table: BlockTable) -> BlockTable:
    """Return the same blocks in two runs, so that attention has to gather them."""
    broken, half = BlockTable(), len(table.blocks) // 2
    for block in (*table.blocks[half:], *table.blocks[:half]):
        broken.append(block)
    return broken


def looping_peak(
    steps: GenerationSteps, layers: cpu_linear.CpuLinears | None = None, *, max_operators: int = MAX_OPERATORS
) -> int | None:
    """Return an upper bound on the peak bytes of the `largest` steps of a model that loops over the tokens of a prompt.
    None if all of them can be traced in full.

    Each phase of a step takes `a + b * n` bytes for a chunk of `n` tokens, with `a` and `b` of at least 0: the context
    is as long for any chunk at its end. A chunk of `n / k` tokens therefore takes at least a k-th of these bytes. Rows
    that decode, and positions with logprobs, are computed by forwards of their own; what is left of those beside the
    chunk is added. `layers`: those that the CPU kernels reorder.
    """
    runner = steps.runner
    chunk, vocab = min(steps.options.prefill_chunk, steps.ctx_size), runner.vocab_size
    if not (isinstance(runner, AlignedRunner) and runner.has_states) or chunk <= TRACED_TOKENS:
        return None
    few, more = (live_bytes(steps.chunk_alone(length, at_end=True)).operators for length in (16, 32))
    if more + (more - few) * (chunk - 32) // 16 <= max_operators:
        return None
    factor = -(-chunk // TRACED_TOKENS)
    length = -(-chunk // factor)
    scaled = factor * max(peak_bytes(steps.chunk_alone(length, at_end=at_end)) for at_end in (True, False))
    asked = min(PROMPT_LOGITS, chunk)
    logprobs = steps.segment(0, 0, asked, prompt_logprobs=True)
    # Logits in two dtypes stay while other rows are computed.
    peak = max(scaled + asked * vocab * 8, peak_bytes(steps.step(logprobs)))
    if runner.caches_keys:  # the mask of the first chunk of a prompt grows with the square of its length
        peak += 4 * chunk * (chunk - length)
    peak += peak_bytes(steps.step(*steps.decodes(steps.capacity.rows)))
    if layers is not None:
        extras = max(layers.peak_row_counts(chunk).values())
        layers.pretend()
        peak += max(extras, *layers.peak_row_counts(chunk).values())
    return peak


def generate(runner: Runner, batch: Batch) -> None:
    """Run one step as the generation loop does, with the most expensive sampling, on rows without earlier state."""
    for segment in batch:
        runner.forget(segment.row)
    logits = runner.run(batch)
    first = 0
    chosen: list[int] = []
    for segment in batch:
        if segment.sequence.prompt_logprobs:
            following = [0] * segment.logits
            logprobs = sampler.COSTLIEST_SAMPLING.logprobs or 0
            sampler.likelihoods(logits[first : first + segment.logits], following, logprobs)
        first += segment.logits
        chosen.extend(range(first - 1 - len(segment.drafted), first))
    rows = logits if len(chosen) == len(logits) else logits[chosen]
    if not isinstance(rows, FakeTensor):
        _sample(rows)
        return
    for device, size in _sampling_peaks(rows.shape, rows.dtype, rows.device).items():
        torch.empty(size, dtype=torch.uint8, device=device)


def _sample(logits: torch.Tensor) -> None:
    sampler.sample(logits, [sampler.RowSampling(sampler.COSTLIEST_SAMPLING, uniform=0.5)] * len(logits))


@cache
def _sampling_peaks(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Mapping[torch.device, int]:
    """Return the peak bytes of the most expensive sampling of logits, by device. Steps of as many rows share it: it was
    a quarter of the time of each."""
    with _disable_current_modes(), FakeTensorMode(), torch.inference_mode():
        return live_bytes(partial(_sample, torch.empty(shape, dtype=dtype, device=device))).peaks


def reordered_peak(model: Any, generation: GenerationSteps, others: Iterable[Step], *, least: int) -> int:
    """Return the peak bytes of all steps before and after the CPU kernels reorder the linear layers of `model`.

    `others`: further steps beside those of `generation`. `least`: bytes that the reordering itself takes; smaller steps
    are not traced.
    """
    layers = cpu_linear.CpuLinears(model)
    peaks = [peak_bytes(step) for step in (*generation.largest(), *others)]
    most = max(least, *peaks)
    for _ in range(2):
        for extra, step in generation.costly_lengths(layers):
            if peaks[0] + extra > most:
                most = max(most, peak_bytes(step))
        layers.pretend()
    return most


def graphs_bytes(runner: PagedRunner, rows: int, ctx_size: int) -> int:
    """Return the bytes of CUDA graphs: buffers, the largest recorded step (memory of a graph serves graphs only), and
    the graphs themselves."""
    # Traced as on the CPU, where attention gathers keys and values: an upper limit, as the Triton kernel takes less.
    graphs = GraphRunner(runner, rows=rows, ctx_size=ctx_size)
    longest = dict(graphs.shapes)  # by batch size
    widest = {blocks: (size, blocks) for size, blocks in longest.items()}  # of those, the largest batch of each length
    largest = max((peak_bytes(partial(graphs.compute, *shape)) for shape in widest.values()), default=0)
    return graphs.buffer_bytes + largest + len(graphs.shapes) * GRAPH_BYTES


def make_encoder(model: Any, options: ModelOptions, *, embeds: bool) -> Encoder:
    """Return the engine's encoder around `model`. Layers behind the model have shapes and no weights."""
    snapshot = Path(options.snapshot)
    found = sentence_transformers_config.read(snapshot) if embeds else None
    return load_encoder.make_encoder(model, CPU, snapshot, found, pad=0, is_dummy=True)[0]


def encoding_steps(model: Any, encoder: Encoder, options: ModelOptions, lengths: Iterable[int]) -> Iterator[Step]:
    """Yield the largest steps of an encoder: a single text of each of `lengths`, and the two longest texts that share a
    batch, with padding. More and shorter texts have as many tokens and smaller masks."""
    usual = model.config._attn_implementation
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    ALL_ATTENTION_FUNCTIONS.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])
    for length in lengths:
        is_masked = usual != "sdpa" or 0 < (window or 0) < length  # a text that is longer than a window has a mask
        yield partial(_encode, model, encoder, usual if is_masked else UNMASKED, [[0] * length])
    longest = min(options.prefill_chunk // 2, max(lengths))
    if longest > 1:
        yield partial(_encode, model, encoder, usual, [[0] * longest, [0] * (longest - 1)])


def _encode(model: Any, encoder: Encoder, implementation: str, texts: list[list[int]]) -> None:
    model.set_attn_implementation(implementation)
    encoder.run([EncoderInput(text) for text in texts])
