"""Pooling and heads of encoders: from hidden states to vectors, and from pairs of texts to scores.

All of it is float32, whatever the model's dtype. Texts are padded on the right and masked, so that the other texts of
a batch change nothing. Models that read padding nevertheless get one text at a time.
"""

import inspect
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.load import safetensors, sentence_transformers_config
from worker.errors import StartError
from worker.interface import EncoderInput
from worker.protocol.architectures import READS_PADDING
from worker.protocol.pickled_weights import PICKLED
from worker.protocol.snapshot_files import WEIGHTS


class Encoder(Protocol):
    """A model that turns texts into tensors."""

    def run(self, texts: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """One float32 tensor in main memory for each text."""


class Embedder:
    """A model whose last hidden states become vectors: `[width]`, or without pooling `[tokens, width]`."""

    def __init__(self, model: Any, device: torch.device, head: "PoolingHead", *, pad: int):
        self._inputs = _EncoderInputs(model, device, pad)
        self.head = head

    @torch.inference_mode()
    def run(self, texts: Sequence[EncoderInput]) -> list[torch.Tensor]:
        vectors: list[torch.Tensor] = []
        for part in self._inputs.parts(texts):
            hidden, mask = self._inputs.forward(part, "last_hidden_state")
            vectors.extend(self.head(hidden.float(), mask, [text.skipped for text in part]))
        return vectors


class CrossEncoder:
    """A model with a classification head of one label: one score `[1]` for each pair of texts."""

    def __init__(self, model: Any, device: torch.device, activation: nn.Module, *, pad: int):
        self._inputs = _EncoderInputs(model, device, pad)
        self._activation = activation
        # Without a padding token, a decoder's head cannot find the end of each text in a batch.
        if getattr(model.config.get_text_config(), "pad_token_id", None) is None:
            self._inputs.runs_alone = True

    @torch.inference_mode()
    def run(self, texts: Sequence[EncoderInput]) -> list[torch.Tensor]:
        scores = torch.cat([self._inputs.forward(part, "logits")[0].float() for part in self._inputs.parts(texts)])
        return list(self._activation(scores).cpu())


class _EncoderInputs:
    """The arguments of a model's forward, for a batch of texts."""

    def __init__(self, model: Any, device: torch.device, pad: int):
        self._model, self._device, self._pad = model, device, pad
        parameters = inspect.signature(model.forward).parameters
        self._takes_kinds = "token_type_ids" in parameters
        self._extra = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
        self.runs_alone = model.config.model_type in READS_PADDING  # one text at a time

    def parts(self, texts: Sequence[EncoderInput]) -> list[Sequence[EncoderInput]]:
        """The texts that may share a forward."""
        return [[text] for text in texts] if self.runs_alone else [texts]

    def forward(self, texts: Sequence[EncoderInput], output: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's `output`, and a mask `[texts, tokens]` that is true for tokens."""
        lengths = torch.tensor([len(text.tokens) for text in texts], device=self._device)
        longest = max(len(text.tokens) for text in texts)
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        extra: dict[str, Any] = dict(self._extra)
        if self._takes_kinds and any(text.kinds for text in texts):
            extra["token_type_ids"] = self._padded([text.kinds for text in texts], longest, 0)
        tokens = self._padded([text.tokens for text in texts], longest, self._pad)
        answer = self._model(input_ids=tokens, attention_mask=mask.long(), **extra)
        return getattr(answer, output), mask

    def _padded(self, rows: Sequence[Sequence[int]], longest: int, filler: int) -> torch.Tensor:
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], device=self._device)


class PoolingHead(nn.Module):
    """The modules after the transformer in modules.json, in order. Without any, each token gives a vector."""

    def __init__(self, found: sentence_transformers_config.EmbedderConfig):
        """Make the layers with random weights, the same each time. `load` fills them."""
        super().__init__()
        self._dimensions = found.dimensions
        self._pooling: sentence_transformers_config.Pooling | None = None
        self.layers = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for step in found.steps:
                if isinstance(step, sentence_transformers_config.Pooling):
                    self._pooling = step
                elif isinstance(step, sentence_transformers_config.Dense):
                    self.layers.append(_Dense(step))
                elif isinstance(step, sentence_transformers_config.LayerNorm):
                    self.layers.append(_LayerNorm(step))
                else:
                    self.layers.append(_Normalize())

    def size(self, width: int) -> int:
        """Components of a vector, for hidden states of `width`. Raises StartError if a layer does not fit."""
        size = width * (len(self._pooling.modes) if self._pooling is not None else 1)
        for layer in self.layers:
            if isinstance(layer, _Dense | _LayerNorm):
                if layer.inputs != size:
                    raise StartError(f"{layer.folder} expects vectors of {layer.inputs} components, but gets {size}")
                size = layer.outputs
        return min(size, self._dimensions or size)

    def load(self) -> "PoolingHead":
        """Fill the layers from the files in their folders. Raises StartError."""
        for layer in self.layers:
            if isinstance(layer, _Dense | _LayerNorm):
                _fill(layer, layer.folder)
        return self

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, skipped: Sequence[int]) -> list[torch.Tensor]:
        """`hidden` `[texts, tokens, width]`, `mask` `[texts, tokens]` (true: a token).

        `skipped`: leading tokens of each text (the instruction) that may be left out of pooling.
        """
        if self._pooling is None:
            return [row[tokens] for row, tokens in zip(hidden.cpu(), mask.cpu(), strict=True)]
        left_out = torch.tensor(skipped if self._pooling.skips_prompt else [0] * len(skipped), device=hidden.device)
        vectors = torch.cat([pool(hidden, mask, mode, left_out) for mode in self._pooling.modes], dim=-1)
        for layer in self.layers:
            vectors = layer(vectors)
        return list(vectors[:, : self._dimensions or None].cpu())


def pool(hidden: torch.Tensor, mask: torch.Tensor, mode: str, left_out: torch.Tensor) -> torch.Tensor:
    """Pool `hidden` `[texts, tokens, width]` to `[texts, width]`. Modes and weights as in sentence-transformers.

    `mask` `[texts, tokens]` is true for tokens. `left_out` `[texts]`: tokens at the beginning that do not count.
    """
    places = torch.arange(hidden.shape[1], device=hidden.device)
    counted = mask & (places >= left_out[:, None])  # [texts, tokens]
    rows = torch.arange(len(hidden), device=hidden.device)
    if mode == "cls":
        return hidden[rows, counted.int().argmax(1)]
    if mode == "last":
        return hidden[rows, mask.sum(1) - 1]
    if mode == "max":
        return hidden.masked_fill(~counted[..., None], -torch.inf).amax(1)
    weights = counted.to(hidden.dtype)
    if mode == "weightedmean":
        weights = weights * (places + 1)  # weight = position, counted from the beginning of the whole text
    total = weights.sum(1, keepdim=True).clamp(min=1e-9)  # [texts, 1]
    summed = (hidden * weights[..., None]).sum(1)
    return summed / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def normalized(vectors: torch.Tensor, norm: int) -> torch.Tensor:
    """Normalize as llama-server's --embd-normalize: -1 none, 0 largest magnitude to 32760, else the p-norm."""
    if norm < 0:
        return vectors
    if norm == 0:
        return vectors * (32760.0 / vectors.abs().amax(-1, keepdim=True).clamp(min=1e-12))
    length: torch.Tensor = torch.linalg.vector_norm(vectors, norm, dim=-1, keepdim=True)
    return vectors / length.clamp(min=1e-12)


def activation(path: str, where: Path) -> nn.Module:
    """The activation of torch.nn named by `path`, as sentence-transformers writes it. Raises StartError.

    Code from elsewhere is not run, and another activation in its place would give wrong numbers.
    """
    package, _, name = path.rpartition(".")
    found = getattr(nn, name, None) if package == "torch.nn" or package.startswith("torch.nn.modules.") else None
    if isinstance(found, type) and issubclass(found, nn.Module):
        try:
            return found()
        except TypeError:
            pass  # it needs arguments, which the file does not have
    raise StartError(f"{where} names the activation {path!r}; only those of torch.nn without arguments are supported")


class _Dense(nn.Module):
    """sentence-transformers' Dense, with the same names of weights."""

    def __init__(self, step: sentence_transformers_config.Dense):
        super().__init__()
        self.folder, self.inputs, self.outputs = step.folder, step.inputs, step.outputs
        self.linear = nn.Linear(step.inputs, step.outputs, bias=step.bias)
        self.activation = activation(step.activation, step.folder / "config.json")
        self.is_residual = step.residual
        if step.residual and step.inputs != step.outputs:
            self.residual = nn.Linear(step.inputs, step.outputs, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.activation(self.linear(vectors))
        if not self.is_residual:
            return changed
        return changed + (vectors if self.inputs == self.outputs else self.residual(vectors))


class _LayerNorm(nn.Module):
    """sentence-transformers' LayerNorm, with the same names of weights."""

    def __init__(self, step: sentence_transformers_config.LayerNorm):
        super().__init__()
        self.folder, self.inputs, self.outputs = step.folder, step.size, step.size
        self.norm = nn.LayerNorm(step.size)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.norm(vectors)
        return changed


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalized(vectors, 2)


def _fill(layer: nn.Module, folder: Path) -> None:
    """Load the weights in `folder` as float32. Raises StartError if they do not fit the layer."""
    tensors = {name: tensor.float().clone() for name, tensor in _stored(folder).items()}
    try:
        layer.load_state_dict(tensors)
    except RuntimeError as error:
        raise StartError(
            f"the weights in {folder} do not fit its config.json: {cuda_errors.one_line(error)}"
        ) from error


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a layer. Pickled ones are small, so they are not converted as those of a model are. Raises
    StartError."""
    pickled = folder / PICKLED
    if (folder / WEIGHTS).is_file() or not pickled.is_file():
        return {
            name: view for path in safetensors.files(folder) for name, view in safetensors.WeightFile(path).tensors()
        }
    try:
        found: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
        return found
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise StartError(
            f"{pickled} is damaged, or has more than tensors: {cuda_errors.one_line(error)}; take a revision with"
            " safetensors"
        ) from error
