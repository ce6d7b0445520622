"""Snapshot to model: configuration and tokenizer (`worker.engines.transformers.load.snapshot`), weights, on their device, in their dtype.

Safetensors only; on the CPU the weights are the mapped files themselves, unless they must be converted. Whatever stands
in the way is a StartError that names it and the way out.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.engines.transformers.device import memory
from worker.engines.transformers.load import (
    layer_split,
    placement,
    quantization,
    safetensors,
    staging,
    tensor_parallel_plan,
)
from worker.engines.transformers.load.layer_split import Split
from worker.engines.transformers.load.model_class import has_pooler, keeps_float32, model_class
from worker.engines.transformers.load.snapshot import is_cross_encoder as is_cross_encoder
from worker.engines.transformers.load.snapshot import is_embedder as is_embedder
from worker.engines.transformers.load.snapshot import load_config as load_config
from worker.engines.transformers.load.snapshot import load_tokenizer as load_tokenizer
from worker.engines.transformers.load.snapshot import native_code as native_code
from worker.engines.transformers.load.snapshot import own_code as own_code
from worker.engines.transformers.load.tensor_parallel_plan import Group, Slice
from worker.errors import StartError
from worker.protocol.argv import ModelOptions
from worker.protocol.events import Progress
from worker.protocol.exits import Exit

Report = Callable[[Progress], None]


_UNUSED_IN_EMBEDDERS = ("pooler.", "cls.", "lm_head.")
"""Layers behind the last hidden state, which pooling reads; checkpoints often leave them out."""


@dataclass(frozen=True)
class Built:
    """A model on the CPU, around weights that are views of mapped files, of which nothing has been read."""

    model: Any
    files: list[safetensors.WeightFile]
    dtype: torch.dtype


@dataclass(frozen=True)
class Loaded:
    """A model ready to run."""

    model: Any
    config: Any
    device: torch.device
    """The first, if there are several."""
    dtype: torch.dtype
    embeds: bool
    files: tuple[safetensors.WeightFile, ...] = ()
    """What weights on the CPU are views of."""
    split: Split | None = None
    """What lies where, if there are several devices."""
    prefault: safetensors.Prefault | None = None
    """What will have those files mapped, once started; None: they are."""

    def let_go(self, view: torch.Tensor) -> bool:
        """Free the pages of weights that nobody needs now; False if they are no part of a mapped file."""
        if self.prefault is not None:
            self.prefault.stop()  # it would have them mapped again
        return any(file.let_go(view) for file in self.files)


def load_model(
    options: ModelOptions,
    config: Any,
    attention: str | None,
    report: Report,
    over: Callable[[str], None] = lambda stage: None,
    built: Built | None = None,
    share: tuple[Slice, Group] | None = None,
) -> Loaded:
    """The model of `config` with its weights, in evaluation mode; `attention` by transformers' name, None: its default.

    Progress counts bytes of weights; `over` is told of the ends of `read`, `copy` and `build`, of each several times,
    as they go hand in hand. `built` by `build`, for the same options. `share`: which slice of each matrix is to be
    here, and who has the others. Raises StartError; Exit.DAMAGED for files cut short, DEVICE_MEMORY and HOST_MEMORY
    where memory ran out.
    """
    devices = placement.devices_of(options)
    device = devices[0] if share is None else placement.device_of(options, share[0].rank)
    embeds = is_embedder(options, config)
    parts = placement.split_of(options, config, devices) if share is None else None
    if options.load_format not in ("auto", "safetensors", "dummy"):
        raise StartError(f"load-format {options.load_format!r} is none of auto, safetensors, dummy", Exit.USAGE)
    try:
        if built is not None and share is None:
            model, prefault = _filled(built, device, parts, report, over)
            return Loaded(model, model.config, device, built.dtype, embeds, tuple(built.files), parts, prefault)
        cls = model_class(options, config, embeds)
        files: tuple[safetensors.WeightFile, ...] = ()
        prefault = None
        with quiet():
            if share is not None:
                model, dtype, files = _divided(cls, options, config, device, share, report, over)
            elif options.load_format == "dummy":
                model, dtype = _random(cls, options, config, device, parts)
            elif quantization.is_quantized(options, config):
                model, dtype = _quantized(cls, options, config, device, report)
            else:
                model, dtype, files, prefault = _stored(cls, options, config, device, parts, embeds, report, over)
        return Loaded(_set_up(model, attention), model.config, device, dtype, embeds, files, parts, prefault)
    except Exception as error:
        if memory.is_exhausted(error):
            where = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
            raise StartError(
                f"no memory for the weights on {', '.join(options.devices)}: {memory.one_line(error)}", where
            ) from error
        raise


def _settled(model: Any, device: torch.device, parts: Split | None) -> Any:
    """The model where it is to be."""
    if parts is None:
        return model.to(device)
    layer_split.place(model, parts)
    return model


def _send(
    model: Any,
    files: Sequence[safetensors.WeightFile],
    device: torch.device,
    parts: Split | None,
    report: Callable[[int], None] = lambda done: None,
    read: Callable[[], None] = lambda: None,
) -> None:
    """Have `model` on its device, or devices; `report` gets the bytes that have arrived there, `read` is called once
    all are read, by whoever brings them to one device."""
    if parts is None:
        staging.move(model, files, device, report, read=read)
    else:
        layer_split.place(model, parts, files, report)


def _set_up(model: Any, attention: str | None) -> Any:
    if attention is not None:
        model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


def build(options: ModelOptions, config: Any, attention: str | None) -> Built | None:
    """The model for `load_model` to fill, where its weights can be used as they lie on disk: None if any would have to
    be converted, put together or quantised. Reads headers only. Raises StartError."""
    if quantization.is_quantized(options, config) or "auto_map" in config.to_dict():
        return None
    embeds = is_embedder(options, config)
    cls = model_class(options, config, embeds)
    files = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    dtype = placement.resolved(options, config, files, torch.device(options.devices[0].partition(":")[0]))
    if any(file.converts_to(dtype) for file in files) or (keeps_float32(cls) and dtype != torch.float32):
        return None
    if not all(file.is_aligned for file in files):
        return None  # those of its tensors that are not have to be copied
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
    ours = {tensor.data_ptr() for tensor in tensors.values()}
    if any(parameter.numel() and parameter.data_ptr() not in ours for parameter in model.parameters()):
        return None
    return Built(model, files, dtype)


def _filled(
    built: Built, device: torch.device, parts: Split | None, report: Report, over: Callable[[str], None]
) -> tuple[Any, safetensors.Prefault | None]:
    """The model of `built` on `device`, or on several, its weights in memory; what will have them mapped, where
    they only have to be."""
    if device.type != "cpu":
        return sent(built.model, built.files, device, report, over, parts), None
    if parts is None and safetensors.are_cached(built.files):
        over("read")
        return built.model, _prefault(built.model, built.files, report)
    with safetensors.ReadAhead(built.files) as ahead:
        told = partial(_tell_weights, report, ahead.total)
        told(0)
        model = _settled(built.model, device, parts)
        over("build")
        ahead.finish(told)
    _let_go_of_others(built.files, model)
    over("read")
    return model, None


def _prefault(model: Any, files: Sequence[safetensors.WeightFile], report: Report) -> safetensors.Prefault:
    """For weights that are in memory as they are: whatever page is not mapped yet is when it is used."""
    total = sum(file.size for file in files)
    _tell_weights(report, total, total)
    return safetensors.Prefault(files, [*model.parameters(), *model.buffers()])


def sent(
    model: Any,
    files: Sequence[safetensors.WeightFile],
    device: torch.device,
    report: Report,
    over: Callable[[str], None],
    parts: Split | None = None,
) -> Any:
    """`model` on `device`, or on several, to which its weights go from their files; of those nothing stays mapped."""
    total = sum(file.size for file in files)
    told = partial(_tell_weights, report, total)
    told(0)
    _send(model, files, device, parts, lambda done: told(min(done, total - 1)), partial(over, "read"))
    told(total)
    _let_go_of_others(files, model)
    over("copy" if parts is None else "read")
    return model


def _tell_weights(report: Report, total: int, done: int) -> None:
    report(Progress(stage="weights", done=done, total=total))


def _let_go_of_others(files: Sequence[safetensors.WeightFile], model: Any) -> None:
    """Of the files' pages, keep what `model` uses: stacked experts are new tensors, and a device has its own."""
    used = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for file in files:
        file.keep_only(used)


def _stored(
    cls: Any,
    options: ModelOptions,
    config: Any,
    device: torch.device,
    parts: Split | None,
    embeds: bool,
    report: Report,
    over: Callable[[str], None],
) -> tuple[Any, torch.dtype, tuple[safetensors.WeightFile, ...], safetensors.Prefault | None]:
    """Views of the mapped files where the type allows; else converted tensor by tensor, so that memory holds each
    weight once. Returns once all is in memory, mapped or not: a step that waits for a disk would look like one that
    hangs."""
    opened = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    dtype = placement.resolved(options, config, opened, device)
    # Of a model in another type memory holds each weight once: never all pages that it is converted from.
    converts = {file for file in opened if not keeps_float32(cls) and file.converts_to(dtype)}
    if device.type != "cpu" and not converts:
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        model = build_around(cls, config, views, dtype, embeds)
        over("build")
        return sent(model, opened, device, report, over, parts), dtype, tuple(opened), None
    if device.type == "cpu" and parts is None and not converts and safetensors.are_cached(opened):
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        over("read")
        model = build_around(cls, config, views, dtype, embeds)
        _let_go_of_others(opened, model)
        over("build")
        return model, dtype, tuple(opened), _prefault(model, opened, report)
    converted = most = 0
    with safetensors.ReadAhead(opened, converts) as ahead:

        def told(done: int) -> None:
            nonlocal most
            most = max(most, done)  # of the same bytes, some are ahead in being read, some in being converted
            _tell_weights(report, ahead.total, most)

        def count(read: int) -> None:
            nonlocal converted
            converted += read
            told(min(converted, ahead.total - 1))

        told(0)
        tensors: dict[str, torch.Tensor] = {}
        for file in opened:
            tensors.update(file.converted(dtype, count) if file in converts else file.tensors())
        over("copy" if converts else "read")
        model = build_around(cls, config, tensors, dtype, embeds)
        if device.type != "cpu":
            _send(model, opened, device, parts)
        else:
            model = _settled(model, device, parts)
        over("build")
        ahead.finish(told)
        over("read")
    _let_go_of_others(opened, model)
    return model, dtype, tuple(opened), None


def _divided(
    cls: Any,
    options: ModelOptions,
    config: Any,
    device: torch.device,
    share: tuple[Slice, Group],
    report: Report,
    over: Callable[[str], None],
) -> tuple[Any, torch.dtype, tuple[safetensors.WeightFile, ...]]:
    """The slices of one rank. The model is built around mapped files, of which nothing is read; of those bytes that the
    slices are, each becomes memory once."""
    opened: list[safetensors.WeightFile] = []
    if options.load_format == "dummy":
        model, dtype = _random(cls, options, config, torch.device("cpu"), None)
    else:
        opened = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
        dtype = placement.resolved(options, config, opened, device)
        stored = next((file.floating for file in opened if file.floating), dtype)
        views = {name: tensor for file in opened for name, tensor in file.tensors()}
        model = build_around(cls, config, views, stored, embeds=False)
        views.clear()
    tensor_parallel_plan.divide(model, *share)
    over("build")
    total, done = sum(each.numel() * dtype.itemsize for each in model.parameters()), 0
    told = partial(_tell_weights, report, total)
    told(0)
    for parameter in model.parameters():
        parameter.data = _owned(parameter.data, opened, dtype, device)
        done += parameter.nbytes
        told(min(done, total - 1))
    if device.type != "cpu":
        staging.move(model, opened, device)
    told(total)
    over("read")
    return model, dtype, tuple(opened)


def _owned(
    view: torch.Tensor, opened: Sequence[safetensors.WeightFile], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A slice in memory of its own. One that is a run of a file, and has the right type, stays as it lies: on the CPU
    those pages are its memory; a device gets it later, with all others of that kind."""
    storage = view.untyped_storage()
    lies_in_file = any(file.offset(view) is not None for file in opened)
    if view.is_contiguous() and view.dtype == dtype and (lies_in_file or view.nbytes == storage.nbytes()):
        if device.type == "cpu" and view.numel():  # a step that waits for a disk would look like one that hangs
            view.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
        return view
    mine = torch.empty(view.shape, dtype=dtype, device=device).copy_(view)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    for file in opened:
        file.let_go(whole)
    return mine


def build_around(cls: Any, config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, embeds: bool) -> Any:
    """The model of `config` around `tensors`, by their names in the files: views stay what they are where nothing has
    to be converted. Raises StartError for tensors that do not fit or are not there."""
    extra = {"add_pooling_layer": False} if embeds and has_pooler(cls) else {}
    try:
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **extra,
        )
    except RuntimeError as error:
        if memory.is_exhausted(error):
            raise
        raise StartError(f"the weights do not fit {cls.__name__}: {memory.one_line(error)}") from error
    for name, stored, expected in sorted(info["mismatched_keys"]):
        shapes = f"{list(stored)} in the file, {list(expected)} by config.json"
        raise StartError(f"the weights do not fit {cls.__name__}: {name} is {shapes}")
    missing = sorted(
        name for name in info["missing_keys"] if not (embeds and any(part in name for part in _UNUSED_IN_EMBEDDERS))
    )
    if missing:
        what = missing[0] if len(missing) == 1 else f"{len(missing)} tensors, {missing[0]} for one"
        raise StartError(
            f"the files lack what {cls.__name__} needs: {what}; fetch the snapshot again, or one whose config.json is"
            " that of its weights"
        )
    return model


def _random(
    cls: Any, options: ModelOptions, config: Any, device: torch.device, parts: Split | None
) -> tuple[Any, torch.dtype]:
    """Weights drawn as for training, the same each time: for trying shapes without files."""
    dtype = placement.resolve_dtype(options.dtype, getattr(config, "dtype", None), device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _settled(cls._from_config(config, dtype=dtype), device, parts)
    return model, dtype


def _quantized(
    cls: Any, options: ModelOptions, config: Any, device: torch.device, report: Report
) -> tuple[Any, torch.dtype]:
    """As transformers loads it, with the library of its method. Raises StartError."""
    files = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    total = sum(file.size for file in files)
    report(Progress(stage="weights", done=0, total=total))
    dtype = placement.resolved(options, config, files, device)
    model = quantization.load(cls, options, config, device, dtype, files)
    _let_go_of_others(files, model)
    if device.type == "cpu":
        quantization.arrange(model, dtype)
        for parameter in model.parameters():  # what lies in the files has not been read yet
            parameter.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
    memory.give_back()
    report(Progress(stage="weights", done=total, total=total))
    return model, dtype


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars on a worker's stderr: progress is an event."""
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
