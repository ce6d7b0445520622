"""Loading of a model: weights from safetensors files, on their devices, in their dtype.

Configuration and tokenizer come from `load.snapshot`. On the CPU the weights are the mapped files themselves, unless
they must be converted. Whatever prevents a load is a StartError with the remedy.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.lazy_pages import LazyPages
from worker.engines.transformers.load import (
    fused_norms,
    layer_split,
    quantization,
    safetensors,
    staging,
    tensor_parallel_plan,
)
from worker.engines.transformers.load.layer_split import LayerSplit
from worker.engines.transformers.load.snapshot import has_pooler, is_embedder, keeps_float32, model_class
from worker.engines.transformers.load.tensor_parallel_plan import RankShare
from worker.errors import StartError
from worker.protocol.architectures import unstated_quantization
from worker.protocol.argv import LOAD_FORMATS, ModelOptions
from worker.protocol.events import Exit, Progress

Report = Callable[[Progress], None]

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # progress is an event

# Layers behind the last hidden state, which embedders do not use; checkpoints often lack them.
_UNUSED_IN_EMBEDDERS = ("pooler.", "cls.", "lm_head.")


@dataclass(frozen=True)
class Built:
    """A model on the CPU around views of mapped files, of which nothing has been read yet."""

    model: Any
    files: list[safetensors.WeightFile]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    model: Any
    device: torch.device  # the first one, if there are several
    dtype: torch.dtype
    files: tuple[safetensors.WeightFile, ...] = ()  # that weights on the CPU are views of
    split: LayerSplit | None = None  # layers per device, if there are several
    share: RankShare | None = None  # of a tensor-parallel model
    unmapped: LazyPages = field(default_factory=LazyPages)  # pages of the files that are cached but not mapped yet

    def release_pages(self, view: torch.Tensor) -> bool:
        """Release the pages of weights that are not needed now. False if they are not part of a mapped file."""
        self.unmapped.stop()  # it would map the pages again
        return any(file.release_pages(view) for file in self.files)


def load_model(
    options: ModelOptions,
    config: Any,
    attention: str | None,
    report: Report,
    stage_done: Callable[[str], None] = lambda stage: None,
    built: Built | None = None,
    share: RankShare | None = None,
) -> LoadedModel:
    """Load the model of `config` in evaluation mode. `attention`: transformers' name, None for its default.

    report: receives progress in bytes of weights.
    stage_done: called at the end of the stages `read`, `copy` and `build`, each several times, since they overlap.
    built: from `build` with the same options.
    share: this process's slice of a tensor-parallel model, and the group of the other ranks.

    Raises StartError, with Exit.DAMAGED for truncated files, DEVICE_MEMORY or HOST_MEMORY if memory ran out.
    """
    devices = layer_split.devices_of(options)
    device = devices[0] if share is None else layer_split.device_of(options, share[0].rank)
    split = layer_split.split_of(options, config, devices) if share is None else None
    if options.load_format not in LOAD_FORMATS:
        raise StartError(f"load-format {options.load_format!r} is none of {', '.join(LOAD_FORMATS)}", Exit.USAGE)
    load = WeightLoad(options, config, device, split, is_embedder(options, config), report, stage_done)
    try:
        if share is not None:
            loaded = load.load_slices(share)
        elif options.load_format == "dummy":
            loaded = load.load_random()
        elif quantization.is_quantized(options, config):
            loaded = load.load_quantized()
        else:
            loaded = load.load_stored(built)
        if built is None or loaded.model is not built.model:  # a rank builds its own, with slices of the weights
            _set_up(loaded.model, attention)
        if device.type != "cpu":
            fused_norms.fuse(loaded.model)
        return loaded
    except Exception as error:
        if cuda_errors.is_exhausted(error):
            where = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
            raise StartError(
                f"no memory for the weights on {', '.join(options.devices)}: {cuda_errors.one_line(error)}", where
            ) from error
        raise


def _set_up(model: Any, attention: str | None) -> Any:
    if attention is not None:
        model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


def build(options: ModelOptions, config: Any, attention: str | None) -> Built | None:
    """Build the model for `load_model` in advance, from file headers only.

    None if a weight must be converted, merged or quantized. Raises StartError.
    """
    if quantization.is_quantized(options, config) or "auto_map" in config.to_dict():
        return None
    embeds = is_embedder(options, config)
    cls = model_class(options, config, embeds)
    files = _opened(options)
    dtype = layer_split.resolved(options, config, files, torch.device(options.devices[0].partition(":")[0]))
    if any(file.converts_to(dtype) for file in files) or (keeps_float32(cls) and dtype != torch.float32):
        return None
    if not all(file.is_aligned for file in files):
        return None  # unaligned tensors must be copied
    tensors = _views(files)
    with torch.device("meta"):
        expected = cls._from_config(config, dtype=dtype).state_dict()
    prefix = f"{cls.base_model_prefix}."
    for name, tensor in tensors.items():
        names = (name, prefix + name, name.removeprefix(prefix))
        if all(candidate not in expected or expected[candidate].shape != tensor.shape for candidate in names):
            return None
    model = _set_up(build_around(cls, config, tensors, dtype, embeds), attention)
    # Compare storage addresses: a parameter elsewhere was initialised by transformers or merged from several tensors.
    ours = {tensor.data_ptr() for tensor in tensors.values()}
    if any(parameter.numel() and parameter.data_ptr() not in ours for parameter in model.parameters()):
        return None
    return Built(model, files)


@dataclass(frozen=True)
class WeightLoad:
    """One load: the model, its devices, and the receivers of progress. Each kind of load is a method."""

    options: ModelOptions
    config: Any
    device: torch.device
    split: LayerSplit | None
    embeds: bool
    report: Report
    stage_done: Callable[[str], None]  # called with each stage that has ended

    @property
    def cls(self) -> Any:
        return model_class(self.options, self.config, self.embeds)

    def load_stored(self, built: Built | None) -> LoadedModel:
        """Load unquantized weights: views of the mapped files where the dtype matches, else converted tensor by tensor,
        so that memory holds each weight once. `built`: the model around the files, if `build` has made it.

        Returns when everything is in memory (mapped or not). A step that waits for a disk would look like a stalled
        worker.
        """
        files = _opened(self.options) if built is None else built.files
        dtype = layer_split.resolved(self.options, self.config, files, self.device)
        # Files to convert are not mapped as a whole: memory would hold the stored and the converted weights.
        converts = {file for file in files if not keeps_float32(self.cls) and file.converts_to(dtype)}
        if self.device.type != "cpu" and not converts:
            model = self._build_around(_views(files), dtype) if built is None else built.model
            self.stage_done("build")
            return self._loaded(self.copy_to_devices(model, files), dtype, files)
        if self.device.type == "cpu" and self.split is None and not converts and safetensors.are_cached(files):
            # Everything is in the page cache: the model can run while its pages are mapped.
            self.stage_done("read")
            if built is None:
                model = self._build_around(_views(files), dtype)
                _release_unused(files, model)
                self.stage_done("build")
            else:
                model = built.model
            total = sum(file.size for file in files)
            self._report(total, total)
            unmapped = safetensors.unmapped_views(files, [*model.parameters(), *model.buffers()])
            return self._loaded(model, dtype, files, unmapped)
        return self._read(files, dtype, converts, built)

    def _read(
        self,
        files: list[safetensors.WeightFile],
        dtype: torch.dtype,
        converts: Set[safetensors.WeightFile],
        built: Built | None,
    ) -> LoadedModel:
        """`load_stored` with files that are not cached, or that must be converted."""
        converted = most = 0
        with safetensors.ReadAhead(files, converts) as ahead:

            def report_bytes(done: int) -> None:
                nonlocal most
                most = max(most, done)  # bytes are counted when read and when converted; report the larger count
                self._report(most, ahead.total)

            def count(read: int) -> None:
                nonlocal converted
                converted += read
                report_bytes(min(converted, ahead.total - 1))

            report_bytes(0)
            if built is None:
                tensors: dict[str, torch.Tensor] = {}
                for file in files:
                    tensors.update(file.converted(dtype, count) if file in converts else file.tensors())
                self.stage_done("copy" if converts else "read")
                model = self._build_around(tensors, dtype)
            else:
                model = built.model
            if self.device.type != "cpu":
                self._copy(model, files)
            else:
                model = self._placed(model)
            self.stage_done("build")
            ahead.finish(report_bytes)
            self.stage_done("read")
        _release_unused(files, model)
        return self._loaded(model, dtype, files)

    def load_slices(self, share: RankShare) -> LoadedModel:
        """Load one rank's slices of a tensor-parallel model.

        The model is built around mapped files without reading them. Only the bytes of the slices become memory.
        """
        files: list[safetensors.WeightFile] = []
        if self.options.load_format == "dummy":
            random = replace(self, device=torch.device("cpu")).load_random()
            model, dtype = random.model, random.dtype
        else:
            files = _opened(self.options)
            dtype = layer_split.resolved(self.options, self.config, files, self.device)
            stored = next((file.floating for file in files if file.floating), dtype)
            model = self._build_around(_views(files), stored)
        tensor_parallel_plan.divide(model, share)
        self.stage_done("build")
        total, done = sum(parameter.numel() * dtype.itemsize for parameter in model.parameters()), 0
        self._report(0, total)
        for parameter in model.parameters():
            parameter.data = _owned(parameter.data, files, dtype, self.device)
            done += parameter.nbytes
            self._report(min(done, total - 1), total)
        if self.device.type != "cpu":
            staging.move(model, files, self.device)
        self._report(total, total)
        self.stage_done("read")
        return replace(self._loaded(model, dtype, files), share=share)

    def load_random(self) -> LoadedModel:
        """Initialise weights randomly, the same each time, as for training (load-format = dummy)."""
        dtype = layer_split.resolve_dtype(self.options.dtype, getattr(self.config, "dtype", None), self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._placed(self.cls._from_config(self.config, dtype=dtype))
        return self._loaded(model, dtype)

    def load_quantized(self) -> LoadedModel:
        """Load a quantized model with transformers and the library of its method. Raises StartError."""
        files = _opened(self.options)
        total = sum(file.size for file in files)
        self._report(0, total)
        dtype = layer_split.resolved(self.options, self.config, files, self.device)
        devices = {"": self.device}
        if self.split is not None:
            with torch.device("meta"):
                devices = layer_split.device_map(self.cls._from_config(self.config, dtype=dtype), self.split)
        model, missing = quantization.load(self.cls, self.options, self.config, devices, dtype, files)
        _check_complete(self.cls, missing, self.embeds)
        if self.split is not None:
            layer_split.place(model, self.split)
        _release_unused(files, model)
        if self.device.type == "cpu":
            quantization.convert_layouts(model, dtype)
            for parameter in model.parameters():  # read pages that are still on disk only
                parameter.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
        memory.give_back()
        self._report(total, total)
        return self._loaded(model, dtype)

    def copy_to_devices(self, model: Any, files: Sequence[safetensors.WeightFile]) -> Any:
        """Copy `model` from its files to its devices. No page of the files stays mapped."""
        total = sum(file.size for file in files)
        self._report(0, total)
        self._copy(
            model, files, lambda done: self._report(min(done, total - 1), total), partial(self.stage_done, "read")
        )
        self._report(total, total)
        _release_unused(files, model)
        self.stage_done("copy" if self.split is None else "read")
        return model

    def _copy(
        self,
        model: Any,
        files: Sequence[safetensors.WeightFile],
        report: Callable[[int], None] = lambda done: None,
        read: Callable[[], None] = lambda: None,
    ) -> None:
        """Move `model` to its devices. `report` gets the bytes that have arrived. `read` is called once all bytes are
        read, if there is one device."""
        if self.split is None:
            staging.move(model, files, self.device, report, read=read)
        else:
            layer_split.place(model, self.split, files, report)

    def _placed(self, model: Any) -> Any:
        """The model on its devices, moved by torch."""
        if self.split is None:
            return model.to(self.device)
        layer_split.place(model, self.split)
        return model

    def _build_around(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
        return build_around(self.cls, self.config, tensors, dtype, self.embeds)

    def _loaded(
        self,
        model: Any,
        dtype: torch.dtype,
        files: Sequence[safetensors.WeightFile] = (),
        unmapped: LazyPages | None = None,
    ) -> LoadedModel:
        return LoadedModel(
            model,
            self.device,
            dtype,
            tuple(files),
            self.split,
            unmapped=unmapped or LazyPages(),
        )

    def _report(self, done: int, total: int) -> None:
        self.report(Progress(stage="weights", done=done, total=total))


def _opened(options: ModelOptions) -> list[safetensors.WeightFile]:
    return [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]


def _views(files: Sequence[safetensors.WeightFile]) -> dict[str, torch.Tensor]:
    """The tensors of all files, by name."""
    return {name: tensor for file in files for name, tensor in file.tensors()}


def _release_unused(files: Sequence[safetensors.WeightFile], model: Any) -> None:
    """Release the pages that `model` does not use: merged experts are new tensors, and a device has its own copy."""
    used = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for file in files:
        file.keep_only(used)


def _owned(
    view: torch.Tensor, opened: Sequence[safetensors.WeightFile], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for one slice. A contiguous slice of a file in the right dtype stays a view: on the CPU its pages are the
    memory, and a device gets it later with all other views."""
    storage = view.untyped_storage()
    lies_in_file = any(file.offset(view) is not None for file in opened)
    if view.is_contiguous() and view.dtype == dtype and (lies_in_file or view.nbytes == storage.nbytes()):
        # Read every page now: a step that waits for a disk would look like a stalled worker.
        if device.type == "cpu" and view.numel():
            view.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
        return view
    mine = torch.empty(view.shape, dtype=dtype, device=device).copy_(view)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    for file in opened:
        file.release_pages(whole)
    return mine


def build_around(cls: Any, config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, embeds: bool) -> Any:
    """Build the model of `config` around `tensors` by their names in the files. Views stay views unless they must be
    converted. Raises StartError for tensors that do not fit or are missing."""
    if fault := unstated_quantization(tensors):
        raise StartError(fault)
    extra = {}
    if embeds and has_pooler(cls):
        extra["add_pooling_layer"] = False
        # Otherwise transformers logs a table of them, as unexpected ones.
        tensors = {name: view for name, view in tensors.items() if "pooler" not in name.split(".")}
    try:
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # raised below, with the tensor's name
            output_loading_info=True,
            **extra,
        )
    except RuntimeError as error:
        if cuda_errors.is_exhausted(error):
            raise
        raise StartError(f"the weights do not fit {cls.__name__}: {cuda_errors.one_line(error)}") from error
    for name, stored, expected in sorted(info["mismatched_keys"]):
        shapes = f"{list(stored)} in the file, {list(expected)} by config.json"
        raise StartError(f"the weights do not fit {cls.__name__}: {name} is {shapes}")
    _check_complete(cls, info["missing_keys"], embeds)
    return model


def _check_complete(cls: Any, missing: Iterable[str], embeds: bool) -> None:
    """Raise StartError if the model needs a tensor that the files lack. transformers would draw it at random."""
    needed = sorted(name for name in missing if not (embeds and any(part in name for part in _UNUSED_IN_EMBEDDERS)))
    if needed:
        what = needed[0] if len(needed) == 1 else f"{len(needed)} tensors, for example {needed[0]}"
        raise StartError(
            f"the files lack what {cls.__name__} needs: {what}; fetch the snapshot again, or one whose config.json is"
            " that of its weights"
        )
