"""The `convert` command: a copy of a snapshot in the layout that the engine maps, so that loads need not convert.

Pickled weights (pytorch_model.bin) become safetensors. Experts that the checkpoint stores one by one are stacked as the
model has them. Everything else is linked. The model's own loading code converts, and its results are written to disk
one by one, so that memory holds only the experts of one layer and what they are made of. The target appears with one
rename, complete and synced to disk, or not at all.
"""

import contextlib
import errno
import fcntl
import os
import pickle
import shutil
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from worker.engines.transformers.load import loader, quantization, safetensors
from worker.engines.transformers.load.snapshot import is_embedder, load_config, model_class
from worker.errors import StartError
from worker.fetch.pickles import pickle_files
from worker.fetch.tensor_writer import TensorWriter
from worker.protocol import pickled_weights
from worker.protocol.argv import Convert, Estimate, ModelOptions
from worker.protocol.events import Converted, Event, Exit, Progress
from worker.protocol.pickled_weights import PICKLED_INDEX
from worker.protocol.snapshot_files import INDEX, MANIFEST, PART, WEIGHTS, ConversionManifest, encode_manifest

Emit = Callable[[Event], None]

MIN_COMPUTED_SHARE = 0.1  # weights are copied if a load would compute at least this share of their bytes; a guess
SPARE_BYTES = 1 << 30  # disk space left free
_WAIT_INTERVAL = 0.25  # seconds between two tries to lock the folder of all targets
_WAIT_REPORT_INTERVAL = 30.0  # most seconds between two events meanwhile


def convert(command: Convert, emit: Emit) -> Converted:
    """Create `command.target` from `command.snapshot`. Do nothing if it exists. Blocks until the target is on disk.

    Only one process converts in a folder of targets at a time; others wait. Raise StartError for a snapshot that cannot
    be loaded and for a folder that cannot be written, with Exit.DISK_FULL if there is no disk space. Nothing of the
    target is left then.
    """
    torch.set_num_threads(command.threads)
    snapshot, target = Path(command.snapshot), Path(command.target)
    options = Estimate(snapshot=command.snapshot)
    config = load_config(options)
    pickles = pickle_files(snapshot)
    with _turn(target.parent, emit), _unfinished(target) as part:
        if part is None:
            return Converted(weights=0)
        if pickles:
            weights = _convert_pickles(snapshot, pickles, config, part, emit)
            replaced = {path.name for path in pickles} | {PICKLED_INDEX}
        else:
            weights = _convert_weights(options, config, part, emit) if is_converted_by_loads(options, config) else 0
            replaced = {path.name for path in safetensors.files(snapshot)} | {INDEX} if weights else set()
        written = sorted(part.iterdir())
        if written:
            _link_others(snapshot, part, replaced)
        _write_manifest(part, snapshot, written)
    return Converted(weights=weights)


# The target


@contextlib.contextmanager
def _turn(folder: Path, emit: Emit) -> Iterator[None]:
    """Hold a lock on `folder` during the block, and wait for it first.

    A conversion needs memory for the experts of one layer, which is gigabytes for large models and not reserved
    anywhere. One conversion at a time keeps that bounded, whatever the number of routers and `router prepare` commands.
    A lock in the router would not cover these. The lock is on the folder itself: no lock file has to be cleaned up, and
    the kernel releases it if this process dies.
    """
    _make(folder)
    with _opened(folder) as descriptor:
        reported, until = -1, 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # The router ends a process without events. This one waits as long as the other one has the lock: that
                # one reports its own progress to the process that started it, and writes nothing during its last check.
                done = _unfinished_bytes(folder)
                if done != reported or time.monotonic() > until:
                    emit(Progress(stage="convert", done=done))
                    reported, until = done, time.monotonic() + _WAIT_REPORT_INTERVAL
                time.sleep(_WAIT_INTERVAL)
        yield


def _unfinished_bytes(folder: Path) -> int:
    """Return the bytes that the running conversion in `folder` has written."""
    total = 0
    for path in folder.glob(f"*{PART}/*"):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            total += path.lstat().st_size
    return total


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path | None]:
    """Yield an empty folder that becomes `target` at the end of the block; None if `target` exists. The folder is
    removed if the block raises."""
    if target.exists():
        yield None
        return
    part = target.with_name(target.name + PART)
    _make(part)
    with _opened(part) as descriptor:
        for path in part.iterdir():  # left by a process that was killed
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        try:
            yield part
            os.fsync(descriptor)
            os.rename(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        with _opened(target.parent) as parent:
            os.fsync(parent)


def _make(folder: Path) -> None:
    """Create a folder, if there is none. Raise StartError if that is not permitted: another try would fail as well."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StartError(
            f"{folder} cannot be created ({error.strerror}), and the converted weights are written there; make it"
            " writable, or give the router another --state-dir"
        ) from error


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _link_others(snapshot: Path, part: Path, replaced: Set[str]) -> None:
    """Link the files of the snapshot that were not converted."""
    for path in snapshot.iterdir():
        # The manifest is written last, and through a link it would overwrite a file of the snapshot.
        if path.name not in (*replaced, MANIFEST) and not (part / path.name).exists():
            (part / path.name).symlink_to(path.resolve())


def _write_manifest(part: Path, snapshot: Path, written: Sequence[Path]) -> None:
    """Write the last file, which lists the converted ones. They are on disk by now."""
    facts = {path.name: path.stat() for path in written}
    files = {name: [found.st_size, found.st_mtime_ns] for name, found in facts.items()}
    with (part / MANIFEST).open("wb") as file:
        file.write(encode_manifest(ConversionManifest(source=str(snapshot), files=files)))
        file.flush()
        os.fsync(file.fileno())


# Pickled weights


def _convert_pickles(snapshot: Path, pickles: Sequence[Path], config: Any, part: Path, emit: Emit) -> int:
    """Write the weights of `pickles` as safetensors, in the layout that the engine maps. Return their bytes."""
    source = part / "unpickled"
    source.mkdir()
    weights = _unpickle(snapshot, pickles, config, source, emit)
    _link_others(snapshot, source, {path.name for path in pickles} | {PICKLED_INDEX})
    options = Estimate(snapshot=str(source))
    if is_converted_by_loads(options, config):
        weights = _convert_weights(options, config, part, emit)
    else:
        os.rename(source / WEIGHTS, part / WEIGHTS)
    shutil.rmtree(source)
    return weights


def _unpickle(snapshot: Path, pickles: Sequence[Path], config: Any, source: Path, emit: Emit) -> int:
    """Write the tensors of `pickles` to a safetensors file in `source`, under their names. Return their bytes.

    Of a tied weight one copy is written, as by transformers' `save_pretrained`. Raise StartError.
    """
    tied = _tied_in(Estimate(snapshot=str(snapshot)), config)
    names, total = 0, 0
    for path in pickles:
        with path.open("rb") as file:
            listed = pickled_weights.tensors(file).values()
        names, total = names + len(listed), total + sum(tensor.bytes for tensor in listed)
    # Not the size of the files: tensors that share data are written once each, unless they are tied.
    check_disk_space(source.parents[1], shutil.disk_usage(source).free, total)

    def on_sync(done: int) -> None:
        emit(Progress(stage="convert", done=min(done, total - 1), total=total))

    with TensorWriter(source / WEIGHTS, names, on_sync) as writer:
        for path in pickles:
            for name, tensor in _without_tied(_loaded(path), tied):
                writer.write(name, tensor)
        written = writer.finish({})
    emit(Progress(stage="convert", done=total, total=total))
    return written


def _loaded(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of one file, mapped where its format allows it. Raise StartError."""
    try:
        # Files of the format before torch 1.6 cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError) as error:
        raise StartError(f"{path} cannot be read by torch.load(weights_only=True): {str(error)[:300]}") from error
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in safetensors.NAMES:
            raise StartError(f"{path}: {name} is no tensor that safetensors can hold; take a revision with safetensors")
    found: Mapping[str, torch.Tensor] = {name: tensor.detach() for name, tensor in loaded.items()}
    return found


def _without_tied(tensors: Mapping[str, torch.Tensor], tied: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors but those of `tied` that are the same data as another one."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        groups.setdefault(same if tensor.numel() else (name,), []).append(name)
    for names in groups.values():
        for name in [name for name in names if name not in tied] or names[:1]:
            yield name, tensors[name]


def _tied_in(options: ModelOptions, config: Any) -> Set[str]:
    """Return the names that share another one's weights in the model, with and without the prefix of its base model."""
    if quantization.is_quantized(options, config) or "auto_map" in config.to_dict():
        return set()
    cls = model_class(options, config, is_embedder(options, config))
    with torch.device("meta"):
        model = cls._from_config(config)
    prefix = f"{cls.base_model_prefix}."
    return {spelling for name in _tied_names(model) for spelling in (name, name.removeprefix(prefix))}


# The weights


def is_converted_by_loads(options: ModelOptions, config: Any) -> bool:
    """Check, by names and shapes, that a load would compute a large part of the weights from the stored ones.

    Renamed weights and weights that the model does not use do not count. Quantized weights, which only their libraries
    understand, and models with code of their own are not converted. Raise StartError.
    """
    if quantization.is_quantized(options, config) or "auto_map" in config.to_dict():
        return False
    cls = model_class(options, config, is_embedder(options, config))
    stored = {
        name: tuple(view.shape)
        for path in safetensors.files(Path(options.snapshot))
        for name, view in safetensors.WeightFile(path).tensors()
    }
    with torch.device("meta"):
        model = cls._from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = f"{cls.base_model_prefix}."
    known = {spelling for name in stored for spelling in (name, prefix + name, name.removeprefix(prefix))}
    spare = Counter(shape for name, shape in stored.items() if name not in expected)
    computed = 0
    for name, shape in expected.items():
        if name in known:
            continue
        if spare[shape]:
            spare[shape] -= 1  # the same tensor under another name
        else:
            computed += prod(shape)
    tied = sum(prod(expected[name]) for name in _tied_names(model) if name in expected and name not in known)
    return bool(computed - tied >= MIN_COMPUTED_SHARE * sum(map(prod, expected.values())))


def _tied_names(model: Any) -> set[str]:
    """Tie the weights of a model and return the names that share another one's weights. They need not be stored."""
    model.tie_weights()
    unique = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique


def _convert_weights(options: ModelOptions, config: Any, part: Path, emit: Emit) -> int:
    """Write the weights as the model has them, in the type of most stored bytes. Return their bytes.

    Raise StartError if there is no disk space, or if a load would convert the result again.
    """
    embeds = is_embedder(options, config)
    cls = model_class(options, config, embeds)
    files = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    tensors = {name: tensor for file in files for name, tensor in file.tensors()}
    bytes_by_type = Counter[torch.dtype]()
    for tensor in tensors.values():
        bytes_by_type[tensor.dtype] += tensor.nbytes if tensor.is_floating_point() else 0
    dtype = max(bytes_by_type, key=bytes_by_type.__getitem__)
    total = sum(tensor.nbytes for tensor in tensors.values())
    check_disk_space(part.parent, shutil.disk_usage(part).free, total)

    def on_sync(done: int) -> None:
        for file in files:
            file.keep_only(frozenset())  # the pages that were read are free again
        emit(Progress(stage="convert", done=min(done, total - 1), total=total))

    with TensorWriter(part / WEIGHTS, 2 * len(tensors) + 64, on_sync) as writer:
        with _caught(writer):
            model = loader.build_around(cls, config, tensors, dtype, embeds)
        _write_buffers(model, writer)
        if narrowed := _narrowed_type(tensors, writer.elements_by_type(), dtype):
            raise StartError(f"{cls.__name__} has weights in {narrowed}, which a copy would convert to {dtype}")
        paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
        del model
        written = writer.finish(paths)
    emit(Progress(stage="convert", done=total - 1, total=total))
    _check_loads_unchanged(cls, config, part, dtype, embeds)
    emit(Progress(stage="convert", done=total, total=total))
    return written


def check_disk_space(folder: Path, free: int, size: int) -> None:
    """Raise StartError unless `size` bytes may be written where `free` bytes are free."""
    if free < size + SPARE_BYTES:
        raise StartError(
            f"{folder} has {free >> 20} MiB free; the converted weights need {size >> 20} MiB, and"
            f" {SPARE_BYTES >> 20} MiB must stay free; make room there, or give the router another --state-dir",
            Exit.DISK_FULL,
        )


@contextlib.contextmanager
def _caught(writer: TensorWriter) -> Iterator[None]:
    """Write each weight that loading assigns to a module, and assign a placeholder of the same shape instead. So the
    whole model is never in memory."""

    def catch(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        # transformers marks parameters that come from the files; meta tensors belong to the empty model
        if parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False) or _is_placeholder(parameter):
            return None
        writer.write((id(module), name), parameter.detach())
        empty = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
        placeholder = torch.nn.Parameter(empty, requires_grad=False)
        placeholder._is_hf_initialized = placeholder.is_placeholder = True  # type: ignore[attr-defined]
        return placeholder

    register: Any = register_module_parameter_registration_hook  # its hooks may return a parameter, as documented
    handle = register(catch)
    try:
        yield
    finally:
        handle.remove()


def _is_placeholder(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "is_placeholder", False)


def _write_buffers(model: Any, writer: TensorWriter) -> None:
    """Write the stored buffers, which loading does not assign as parameters. Raise StartError for a weight that did not
    come from the files."""
    own = {id(parameter) for parameter in model.parameters() if not _is_placeholder(parameter)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.nn.Parameter):
            writer.write(name, tensor)
        elif id(tensor) in own and tensor.numel():
            raise StartError(f"{type(model).__name__} was loaded without {name}")


def _narrowed_type(
    tensors: Mapping[str, torch.Tensor], written: Mapping[torch.dtype, int], dtype: torch.dtype
) -> torch.dtype | None:
    """Return a floating-point type with fewer written than stored elements: some of them lost precision."""
    stored = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            stored[tensor.dtype] += tensor.numel()
    return next((kind for kind, count in stored.items() if written.get(kind, 0) < count), None)


def _check_loads_unchanged(cls: Any, config: Any, part: Path, dtype: torch.dtype, embeds: bool) -> None:
    """Raise StartError unless a load maps the written weights without converting them."""
    file = safetensors.WeightFile(part / WEIGHTS)
    views = dict(file.tensors())
    model = loader.build_around(cls, config, views, dtype, embeds)
    mapped = {view.data_ptr() for view in views.values()}
    copied = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.data_ptr() not in mapped and parameter.numel()
    }
    # Some modules are float32 in any model, so loads always convert those.
    if sum(parameter.nbytes for parameter in copied.values()) > 0.01 * file.size:
        raise StartError(f"{cls.__name__} converts {next(iter(copied))} of the converted weights again")
