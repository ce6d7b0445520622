"""Snapshot to snapshot: what loading would convert each time, converted once.

Experts that a checkpoint has one by one are written as the model has them, stacked, so that a load maps them; a
tokenizer without its fast form gets it, once it was seen to say the same. All else is linked. It is the model's own
conversion, caught as it hands over its results one by one: what is in memory at once is one layer's experts and what
they are made of. The target comes to be with one rename, complete and on the disk, or not at all.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from worker.engines.transformers.load import loader, quantization, safetensors, snapshot
from worker.engines.transformers.load.page_cache import PieceWriter
from worker.errors import StartError
from worker.protocol.argv import Convert, Estimate, ModelOptions
from worker.protocol.events import Converted, Event, Exit, Progress
from worker.protocol.snapshot_files import INDEX, MANIFEST, WEIGHTS, ConversionManifest, encode_manifest

Say = Callable[[Event], None]

log = logging.getLogger(__name__)

LEAST_SHARE = 0.1
"""Of a model's bytes that a load would have to compute: for less it is not copied. A guess."""
SPARE_BYTES = 1 << 30
"""Of the disk that are left to others."""
PART = ".part"
"""What a target's folder is called until it is complete; who writes it holds a lock (flock) on it."""
_STRETCH = 16 << 20
"""Bytes written at once."""
_SYNCED = 256 << 20
"""Bytes written between two that are known to be on the disk: what waits to be written is memory of others."""
_HEADER_ALIGNMENT = 64
"""Of the first tensor's place in the file, for the processor's sake."""
_TOKENIZER = "tokenizer.json"
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\t and\n\nlines \r\n",
    "Größe, naïve, \u0130stanbul, \u212b, e\u0301 and \ufb01",
    "Быстрая лиса 敏捷的棕色狐狸 素早い茶色の狐 🦊👩‍👩‍👧 \u200d\u00a0",
    'def f(x: int) -> str:\n    return f"{x:>8}"  # 12345 3.14e-10',
    "",
)
"""Texts in which tokenizers differ if they do: spaces, what normalisation changes, other scripts, digits."""


def convert(command: Convert, say: Say) -> Converted:
    """Make `command.target` of `command.snapshot`, where anything has to be converted; where it exists already, nothing
    is done. Blocks for as long as disk and processor take.

    Raises StartError for what cannot be loaded or is converted by another process at this moment, with Exit.DISK_FULL
    where the disk has no room; nothing is left of the target then.
    """
    torch.set_num_threads(command.threads)
    snapshot, target = Path(command.snapshot), Path(command.target)
    options = Estimate(snapshot=command.snapshot)
    config = loader.load_config(options)
    written, has_tokenizer = 0, False
    with _part(target) as part:
        if part is None:
            return Converted(weights=0, tokenizer=False)
        has_tokenizer = _convert_tokenizer(snapshot, part)
        if is_converted_by_loads(options, config):
            written = _convert_weights(options, config, part, say)
        made = sorted(part.iterdir())
        if made:
            _link_others(snapshot, part, weights_are_here=bool(written))
        _sign(part, snapshot, made)
    return Converted(weights=written, tokenizer=has_tokenizer)


# The target


@contextlib.contextmanager
def _part(target: Path) -> Iterator[Path | None]:
    """An empty folder that becomes `target` at the end of the block, and is gone if that raises; None if there is one
    already."""
    part = target.with_name(target.name + PART)
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"{target} is being made by another process") from None
        if target.exists():
            with contextlib.suppress(OSError):
                part.rmdir()
            yield None
            return
        for left in part.iterdir():  # by somebody who was killed
            left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)
        try:
            yield part
            os.fsync(descriptor)
            os.rename(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _sync_folder(target.parent)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_others(snapshot: Path, part: Path, *, weights_are_here: bool) -> None:
    """Links to what of the snapshot is right as it lies."""
    replaced = {path.name for path in safetensors.files(snapshot)} | {INDEX} if weights_are_here else set()
    for path in snapshot.iterdir():
        if path.name not in replaced and not (part / path.name).exists():
            (part / path.name).symlink_to(path.resolve())


def _sign(part: Path, snapshot: Path, made: Sequence[Path]) -> None:
    """The last file: what was made, all of it on the disk by now."""
    facts = {path.name: path.stat() for path in made}
    files = {name: [each.st_size, each.st_mtime_ns] for name, each in facts.items()}
    text = encode_manifest(ConversionManifest(source=str(snapshot), files=files))
    with (part / MANIFEST).open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# The tokenizer


def _convert_tokenizer(snapshot: Path, part: Path) -> bool:
    """Write the fast form of a tokenizer that is stored without, if it says the same as what loading makes of it."""
    if (snapshot / _TOKENIZER).exists():
        return False
    try:
        usual = loader.load_tokenizer(Estimate(snapshot=str(snapshot)))
    except StartError as error:
        log.info("the tokenizer is left to loads: %s", error)
        return False
    fast = getattr(usual, "backend_tokenizer", None)
    if fast is None:
        return False
    trial = part / "trial"
    trial.mkdir()
    try:
        for path in snapshot.iterdir():
            if path.is_file() and not path.name.endswith(".safetensors"):
                (trial / path.name).symlink_to(path.resolve())
        fast.save(str(trial / _TOKENIZER))
        stored = loader.load_tokenizer(Estimate(snapshot=str(trial)))
        if differs := difference(usual, stored):
            log.info("the tokenizer is left to loads: its fast form differs in %s", differs)
            return False
        with (trial / _TOKENIZER).open("rb") as file:
            os.fsync(file.fileno())
        os.rename(trial / _TOKENIZER, part / _TOKENIZER)
        return True
    except StartError as error:
        log.info("the tokenizer is left to loads: of its fast form is said: %s", error)
        return False
    finally:
        shutil.rmtree(trial)


def difference(one: Any, other: Any) -> str:
    """In what two tokenizers differ; "" if in nothing that was looked at."""
    if type(one) is not type(other):
        return "class"
    if one.get_vocab() != other.get_vocab():
        return "vocabulary"
    if (one.special_tokens_map, one.all_special_ids) != (other.special_tokens_map, other.all_special_ids):
        return "special tokens"
    if one.chat_template != other.chat_template or one.model_max_length != other.model_max_length:
        return "what it states"
    texts = [*PROBES, *(f"a {token} b{token}" for token in one.all_special_tokens)]
    for text in texts:
        ids = one.encode(text)
        if ids != other.encode(text) or one.encode(text, add_special_tokens=False) != other.encode(
            text, add_special_tokens=False
        ):
            return f"the tokens of {text[:20]!r}"
        if one.decode(ids) != other.decode(ids):
            return f"the text of {ids[:8]}"
    return ""


# The weights


def is_converted_by_loads(options: ModelOptions, config: Any) -> bool:
    """Whether a good part of the model's weights would be computed from the stored ones: told from names and shapes.

    What only has another name is no conversion, nor what the model does not use. Quantised weights, which only their
    libraries understand, and code of the snapshot's own are left to loads. Raises StartError.
    """
    if quantization.is_quantized(options, config) or "auto_map" in config.to_dict():
        return False
    cls = snapshot.model_class(options, config, loader.is_embedder(options, config))
    stored = {
        name: tuple(view.shape)
        for path in safetensors.files(Path(options.snapshot))
        for name, view in safetensors.WeightFile(path).tensors()
    }
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls._from_config(config).state_dict().items()}
    prefix = f"{cls.base_model_prefix}."
    known = {each for name in stored for each in (name, prefix + name, name.removeprefix(prefix))}
    spare = Counter(shape for name, shape in stored.items() if name not in expected)
    computed = 0
    for name, shape in expected.items():
        if name in known:
            continue
        if spare[shape]:
            spare[shape] -= 1  # only called differently
        else:
            computed += prod(shape)
    tied = sum(prod(expected[name]) for name in _tied(cls, config) if name in expected and name not in known)
    share = LEAST_SHARE * sum(map(prod, expected.values()))
    return bool(computed - tied >= share)


def _tied(cls: Any, config: Any) -> set[str]:
    """Names of weights that are another one's, and need not be stored."""
    with torch.device("meta"):
        model = cls._from_config(config)
    model.tie_weights()
    kept = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept


def _convert_weights(options: ModelOptions, config: Any, part: Path, say: Say) -> int:
    """Write the model's weights as the model has them, in the type that most are stored in; returns their bytes.

    Raises StartError if there is no room, or if the result would not be loaded as it lies.
    """
    embeds = loader.is_embedder(options, config)
    cls = snapshot.model_class(options, config, embeds)
    opened = [safetensors.WeightFile(path) for path in safetensors.files(Path(options.snapshot))]
    tensors = {name: tensor for file in opened for name, tensor in file.tensors()}
    sizes = Counter[torch.dtype]()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.nbytes if tensor.is_floating_point() else 0
    dtype = max(sizes, key=sizes.__getitem__)
    total = sum(tensor.nbytes for tensor in tensors.values())
    check_room(part.parent, shutil.disk_usage(part).free, total)

    def told(done: int) -> None:
        for file in opened:
            file.keep_only(frozenset())  # what was read is the kernel's again
        say(Progress(stage="convert", done=min(done, total - 1), total=total))

    with loader.quiet(), Sink(part / WEIGHTS, 2 * len(tensors) + 64, told) as sink:
        with _caught(sink):
            model = loader.build_around(cls, config, tensors, dtype, embeds)
        missing = _name(model, sink)
        if missing:
            raise StartError(f"{cls.__name__} was loaded without {missing[0]}; it is left to loads")
        if lost := _narrowed(tensors, sink.dtypes(), dtype):
            raise StartError(f"{cls.__name__} would have weights in {lost} converted to {dtype}; it is left to loads")
        del model
        written = sink.finish()
    with loader.quiet():
        _prove(cls, config, part, dtype, embeds)
    say(Progress(stage="convert", done=total, total=total))
    return written


def check_room(folder: Path, free: int, size: int) -> None:
    """Raises StartError unless `size` bytes may be written where so many are free."""
    if free < size + SPARE_BYTES:
        raise StartError(
            f"{folder} has {free >> 20} MiB free; weights in the model's own layout take {size >> 20}, and"
            f" {SPARE_BYTES >> 20} are left to others",
            Exit.DISK_FULL,
        )


@contextlib.contextmanager
def _caught(sink: "Sink") -> Iterator[None]:
    """Each weight that loading hands to a module goes to `sink`; the module gets something of its shape in place."""

    def catch(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        # transformers marks what it has from the files; meta tensors are the skeleton's
        if parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return None
        if getattr(parameter, "is_stand_in", False):
            return None
        sink.take(module, name, parameter.detach())
        empty = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
        stand_in = torch.nn.Parameter(empty, requires_grad=False)
        stand_in._is_hf_initialized = stand_in.is_stand_in = True  # type: ignore[attr-defined]
        return stand_in

    register: Any = register_module_parameter_registration_hook  # whose hooks may return a parameter, as it documents
    handle = register(catch)
    try:
        yield
    finally:
        handle.remove()


def _name(model: Any, sink: "Sink") -> list[str]:
    """Say what the weights are called that were written, and write the buffers that were stored; returns the names of
    those that the model has from nowhere."""
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    sink.call({key: f"{path}.{key[1]}" if (path := paths[key[0]]) else key[1] for key in sink.taken()})
    own = {id(parameter) for parameter in model.parameters() if not getattr(parameter, "is_stand_in", False)}
    missing = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.nn.Parameter):
            if id(tensor) in own and tensor.numel():
                missing.append(name)
        else:
            sink.take_named(name, tensor)
    return missing


def _narrowed(
    tensors: Mapping[str, torch.Tensor], written: Mapping[torch.dtype, int], dtype: torch.dtype
) -> torch.dtype | None:
    """A floating type of which more elements are stored than were written: they lost digits. None: there is none."""
    stored: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            stored[tensor.dtype] += tensor.numel()
    return next((kind for kind, count in stored.items() if written.get(kind, 0) < count), None)


def _prove(cls: Any, config: Any, part: Path, dtype: torch.dtype, embeds: bool) -> None:
    """Raises StartError unless a load of what was written takes the weights as they lie."""
    file = safetensors.WeightFile(part / WEIGHTS)
    views = dict(file.tensors())
    model = loader.build_around(cls, config, views, dtype, embeds)
    ours = {view.data_ptr() for view in views.values()}
    copied = [name for name, each in model.named_parameters() if each.data_ptr() not in ours and each.numel()]
    share = sum(parameter.nbytes for name, parameter in model.named_parameters() if name in copied)
    if share > 0.01 * file.size:  # some modules are always converted, those of float32
        raise StartError(f"{cls.__name__} does not load {copied[0]} as it was written; it is left to loads")


_Key = tuple[int, str]
"""Id of a module, and a parameter's name there."""


class Sink:
    """A safetensors file that is written as its tensors come, in their order; the header last, into room that was left
    for it. On the disk piece by piece."""

    def __init__(self, path: Path, count: int, told: Callable[[int], None]):
        """`count`: tensors at most; `told` is called with the bytes written so far, each time that some are safe."""
        self._room = -(-(8 + 512 + 512 * count) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
        """Bytes before the first tensor."""
        self._path = path
        self._told = told
        self._end = 0
        self._synced = 0
        """Up to there it is on the disk."""
        self._places: dict[_Key, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._names: dict[_Key, str] = {}
        self._descriptor = -1

    def __enter__(self) -> "Sink":
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._pieces = PieceWriter(self._descriptor, self._room)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def take(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        self._put((id(module), name), tensor)

    def take_named(self, name: str, tensor: torch.Tensor) -> None:
        self._put((0, name), tensor)
        self._names[0, name] = name

    def taken(self) -> list[_Key]:
        return list(self._places)

    def call(self, names: Mapping[_Key, str]) -> None:
        self._names.update(names)

    def dtypes(self) -> Counter[torch.dtype]:
        """Elements written, by type."""
        found: Counter[torch.dtype] = Counter()
        for _, dtype, shape in self._places.values():
            found[dtype] += prod(shape)
        return found

    def finish(self) -> int:
        """Write the header; returns the bytes of the tensors, once all is on the disk."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for key, (start, dtype, shape) in self._places.items():
            size = prod(shape) * dtype.itemsize
            entry = {"dtype": safetensors.NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
            header[self._names[key]] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room - 8:
            raise StartError(f"the names of {len(self._places)} tensors take {len(text)} bytes; it is left to loads")
        self._pieces.flush()
        head = PieceWriter(self._descriptor)
        head.append((self._room - 8).to_bytes(8, "little") + text.ljust(self._room - 8))
        head.flush()
        os.fsync(self._descriptor)
        return self._end

    def _put(self, key: _Key, tensor: torch.Tensor) -> None:
        if key in self._places:
            raise StartError(f"{key[1]} came twice while the model was loaded; it is left to loads")
        self._places[key] = (self._end, tensor.dtype, tuple(tensor.shape))
        if tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _STRETCH):
                stretch = flat[start : start + _STRETCH]
                self._pieces.append(stretch.numpy().data)
                self._end += len(stretch)
                if self._pieces.written - self._synced >= _SYNCED:
                    os.fdatasync(self._descriptor)
                    self._synced = self._pieces.written
                    self._told(self._synced - self._room)


__all__ = ["PART", "convert", "is_converted_by_loads"]
