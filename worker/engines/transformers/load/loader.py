"""Loading of a model: weights from safetensors files, on their devices, in their dtype.

Configuration and tokenizer come from `load.snapshot`. On the CPU the weights are the mapped files themselves, unless
they must be converted. Whatever prevents a load is a StartError with the way out.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.lazy_pages import LazyPages
from worker.engines.transformers.load import (
    layer_split,
    quantization,
    safetensors,
    staging,
    tensor_parallel_plan,
)
from worker.engines.transformers.load.layer_split import LayerSplit
from worker.engines.transformers.load.snapshot import has_pooler, is_embedder, keeps_float32, model_class
from worker.engines.transformers.load.tensor_parallel_plan import RankGroup, RankSlice
from worker.errors import StartError
from worker.protocol.argv import ModelOptions
from worker.protocol.events import Exit, Progress

Report = Callable[[Progress], None]


# Layers behind the last hidden state, which embedders do not use; checkpoints often lack them.
_UNUSED_IN_EMBEDDERS = ("pooler.", "cls.", "lm_head.")


@dataclass(frozen=True)
class Built:
    """A model on the CPU around views of mapped files, of which nothing has been read yet."""

    model: Any
    files: list[safetensors.WeightFile]
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    model: Any
    config: Any
    device: torch.device  # the first one, if there are several
    dtype: torch.dtype
    embeds: bool
    files: tuple[safetensors.WeightFile, ...] = ()  # that weights on the CPU are views of
    split: LayerSplit | None = None  # layers per device, if there are several
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
    over: Callable[[str], None] = lambda stage: None,
    built: Built | None = None,
    share: tuple[RankSlice, RankGroup] | None = None,
) -> LoadedModel:
    """Load the model of `config` in evaluation mode. `attention`: transformers' name, None for its default.

    Progress counts bytes of weights. `over` is called at the end of the stages `read`, `copy` and `build`, each several
    times, since they overlap. `built`: from `build` with the same options. `share`: this process's slice of a
    tensor-parallel model, and the group of the other ranks.

    Raises StartError, with Exit.DAMAGED for truncated files, DEVICE_MEMORY or HOST_MEMORY if memory ran out.
    """
    devices = layer_split.devices_of(options)
    device = devices[0] if share is None else layer_split.device_of(options, share[0].rank)
    embeds = is_embedder(options, config)
    parts = layer_split.split_of(options, config, devices) if share is None else None
    if options.load_format not in ("auto", "safetensors", "dummy"):
        raise StartError(f"load-format {options.load_format!r} is none of auto, safetensors, dummy", Exit.USAGE)
    try:
        if built is not None and share is None:
            model, unmapped = _fill(built, device, parts, report, over)
            return LoadedModel(model, model.config, device, built.dtype, embeds, tuple(built.files), parts, unmapped)
        cls = model_class(options, config, embeds)
        files: tuple[safetensors.WeightFile, ...] = ()
        unmapped = LazyPages()
        with quiet():
            if share is not None:
                model, dtype, files = _load_slices(cls, options, config, device, share, report, over)
            elif options.load_format == "dummy":
                model, dtype = _random(cls, options, config, device, parts)
            elif quantization.is_quantized(options, config):
                model, dtype = _quantized(cls, options, config, device, report)
            else:
                model, dtype, files, unmapped = _stored(cls, options, config, device, parts, embeds, report, over)
        return LoadedModel(_set_up(model, attention), model.config, device, dtype, embeds, files, parts, unmapped)
    except Exception as error:
        if cuda_errors.is_exhausted(error):
            where = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
            raise StartError(
                f"no memory for the weights on {', '.join(options.devices)}: {cuda_errors.one_line(error)}", where
            ) from error
        raise


def _placed(model: Any, device: torch.device, parts: LayerSplit | None) -> Any:
    """The model on its device or devices."""
    if parts is None:
        return model.to(device)
    layer_split.place(model, parts)
    return model


def _send(
    model: Any,
    files: Sequence[safetensors.WeightFile],
    device: torch.device,
    parts: LayerSplit | None,
    report: Callable[[int], None] = lambda done: None,
    read: Callable[[], None] = lambda: None,
) -> None:
    """Move `model` to its device or devices. `report` gets the bytes that have arrived. `read` is called once all bytes
    are read, if there is one device."""
    if parts is None:
        staging.move(model, files, device, report, read=read)
    else:
        layer_split.place(model, parts, files, report)


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
    files = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    dtype = layer_split.resolved(options, config, files, torch.device(options.devices[0].partition(":")[0]))
    if any(file.converts_to(dtype) for file in files) or (keeps_float32(cls) and dtype != torch.float32):
        return None
    if not all(file.is_aligned for file in files):
        return None  # unaligned tensors must be copied
    tensors = {name: tensor for file in files for name, tensor in file.tensors()}
    with torch.device("meta"):
        expected = cls._from_config(config, dtype=dtype).state_dict()
    prefix = f"{cls.base_model_prefix}."
    for name, tensor in tensors.items():
        names = (name, prefix + name, name.removeprefix(prefix))
        if all(each not in expected or expected[each].shape != tensor.shape for each in names):
            return None
    with quiet():
        model = _set_up(build_around(cls, config, tensors, dtype, embeds), attention)
    # Compare storage addresses: a parameter elsewhere was initialised by transformers or merged from several tensors.
    ours = {tensor.data_ptr() for tensor in tensors.values()}
    if any(parameter.numel() and parameter.data_ptr() not in ours for parameter in model.parameters()):
        return None
    return Built(model, files, dtype)


def _fill(
    built: Built, device: torch.device, parts: LayerSplit | None, report: Report, over: Callable[[str], None]
) -> tuple[Any, LazyPages]:
    """The model of `built` on `device` or devices with its weights in memory, and its pages that are not mapped yet."""
    if device.type != "cpu":
        return sent(built.model, built.files, device, report, over, parts), LazyPages()
    if parts is None and safetensors.are_cached(built.files):
        # Everything is in the page cache: the model can run while its pages are mapped.
        over("read")
        return built.model, _unmapped(built.model, built.files, report)
    with safetensors.ReadAhead(built.files) as ahead:
        report_bytes = partial(_report_weights, report, ahead.total)
        report_bytes(0)
        model = _placed(built.model, device, parts)
        over("build")
        ahead.finish(report_bytes)
    _release_unused(built.files, model)
    over("read")
    return model, LazyPages()


def _unmapped(model: Any, files: Sequence[safetensors.WeightFile], report: Report) -> LazyPages:
    """Report weights in the page cache as loaded, and return their pages."""
    total = sum(file.size for file in files)
    _report_weights(report, total, total)
    return safetensors.unmapped_views(files, [*model.parameters(), *model.buffers()])


def sent(
    model: Any,
    files: Sequence[safetensors.WeightFile],
    device: torch.device,
    report: Report,
    over: Callable[[str], None],
    parts: LayerSplit | None = None,
) -> Any:
    """Copy `model` from its files to `device` or devices. No page of the files stays mapped."""
    total = sum(file.size for file in files)
    report_bytes = partial(_report_weights, report, total)
    report_bytes(0)
    _send(model, files, device, parts, lambda done: report_bytes(min(done, total - 1)), partial(over, "read"))
    report_bytes(total)
    _release_unused(files, model)
    over("copy" if parts is None else "read")
    return model


def _report_weights(report: Report, total: int, done: int) -> None:
    report(Progress(stage="weights", done=done, total=total))


def _release_unused(files: Sequence[safetensors.WeightFile], model: Any) -> None:
    """Release the pages that `model` does not use: merged experts are new tensors, and a device has its own copy."""
    used = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for file in files:
        file.keep_only(used)


def _stored(
    cls: Any,
    options: ModelOptions,
    config: Any,
    device: torch.device,
    parts: LayerSplit | None,
    embeds: bool,
    report: Report,
    over: Callable[[str], None],
) -> tuple[Any, torch.dtype, tuple[safetensors.WeightFile, ...], LazyPages]:
    """Load unquantized weights: views of the mapped files where the dtype matches, else converted tensor by tensor, so
    that memory holds each weight once.

    Returns when everything is in memory (mapped or not). A step that waits for a disk would look like a stalled worker.
    """
    opened = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    dtype = layer_split.resolved(options, config, opened, device)
    # Files to convert are not mapped as a whole: memory would hold the stored and the converted weights.
    converts = {file for file in opened if not keeps_float32(cls) and file.converts_to(dtype)}
    if device.type != "cpu" and not converts:
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        model = build_around(cls, config, views, dtype, embeds)
        over("build")
        return sent(model, opened, device, report, over, parts), dtype, tuple(opened), LazyPages()
    if device.type == "cpu" and parts is None and not converts and safetensors.are_cached(opened):
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        over("read")
        model = build_around(cls, config, views, dtype, embeds)
        _release_unused(opened, model)
        over("build")
        return model, dtype, tuple(opened), _unmapped(model, opened, report)
    converted = most = 0
    with safetensors.ReadAhead(opened, converts) as ahead:

        def report_bytes(done: int) -> None:
            nonlocal most
            most = max(most, done)  # bytes are counted when read and when converted; report the larger count
            _report_weights(report, ahead.total, most)

        def count(read: int) -> None:
            nonlocal converted
            converted += read
            report_bytes(min(converted, ahead.total - 1))

        report_bytes(0)
        tensors: dict[str, torch.Tensor] = {}
        for file in opened:
            tensors.update(file.converted(dtype, count) if file in converts else file.tensors())
        over("copy" if converts else "read")
        model = build_around(cls, config, tensors, dtype, embeds)
        if device.type != "cpu":
            _send(model, opened, device, parts)
        else:
            model = _placed(model, device, parts)
        over("build")
        ahead.finish(report_bytes)
        over("read")
    _release_unused(opened, model)
    return model, dtype, tuple(opened), LazyPages()


def _load_slices(
    cls: Any,
    options: ModelOptions,
    config: Any,
    device: torch.device,
    share: tuple[RankSlice, RankGroup],
    report: Report,
    over: Callable[[str], None],
) -> tuple[Any, torch.dtype, tuple[safetensors.WeightFile, ...]]:
    """Load one rank's slices of a tensor-parallel model.

    The model is built around mapped files without reading them. Only the bytes of the slices become memory.
    """
    opened: list[safetensors.WeightFile] = []
    if options.load_format == "dummy":
        model, dtype = _random(cls, options, config, torch.device("cpu"), None)
    else:
        opened = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
        dtype = layer_split.resolved(options, config, opened, device)
        stored = next((file.floating for file in opened if file.floating), dtype)
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        model = build_around(cls, config, views, stored, embeds=False)
        views.clear()
    tensor_parallel_plan.divide(model, *share)
    over("build")
    total, done = sum(each.numel() * dtype.itemsize for each in model.parameters()), 0
    report_bytes = partial(_report_weights, report, total)
    report_bytes(0)
    for parameter in model.parameters():
        parameter.data = _owned(parameter.data, opened, dtype, device)
        done += parameter.nbytes
        report_bytes(min(done, total - 1))
    if device.type != "cpu":
        staging.move(model, opened, device)
    report_bytes(total)
    over("read")
    return model, dtype, tuple(opened)


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
    extra = {"add_pooling_layer": False} if embeds and has_pooler(cls) else {}
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
    missing = sorted(
        name for name in info["missing_keys"] if not (embeds and any(part in name for part in _UNUSED_IN_EMBEDDERS))
    )
    if missing:
        what = missing[0] if len(missing) == 1 else f"{len(missing)} tensors, for example {missing[0]}"
        raise StartError(
            f"the files lack what {cls.__name__} needs: {what}; fetch the snapshot again, or one whose config.json is"
            " that of its weights"
        )
    return model


def _random(
    cls: Any, options: ModelOptions, config: Any, device: torch.device, parts: LayerSplit | None
) -> tuple[Any, torch.dtype]:
    """Random weights, the same each time, as initialised for training (load-format = dummy)."""
    dtype = layer_split.resolve_dtype(options.dtype, getattr(config, "dtype", None), device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _placed(cls._from_config(config, dtype=dtype), device, parts)
    return model, dtype


def _quantized(
    cls: Any, options: ModelOptions, config: Any, device: torch.device, report: Report
) -> tuple[Any, torch.dtype]:
    """Load a quantized model with transformers and the library of its method. Raises StartError."""
    files = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    total = sum(file.size for file in files)
    report(Progress(stage="weights", done=0, total=total))
    dtype = layer_split.resolved(options, config, files, device)
    model = quantization.load(cls, options, config, device, dtype, files)
    _release_unused(files, model)
    if device.type == "cpu":
        quantization.convert_layouts(model, dtype)
        for parameter in model.parameters():  # read pages that are still on disk only
            parameter.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
    memory.give_back()
    report(Progress(stage="weights", done=total, total=total))
    return model, dtype


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars on stderr: progress is an event."""
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
