"""Weights that torch.save has written: the names of their files, and the tensors in a file, read without executing it.

A file is a zip archive with a pickle (data.pkl) and one entry for the data of each storage, or, before torch 1.6, a
sequence of pickles followed by the data. A pickle is a program, and its instructions can call any function. Here only
those instructions are accepted that `torch.load(weights_only=True)` executes for a dictionary of tensors, and the
functions that it calls are replaced by stand-ins. Anything else is an error that names it. So the sizes of a checkpoint
are known without torch, and a pickle that would run code is rejected before anything loads it.

Formats: torch/serialization.py (`_save`, `_legacy_save`), torch/_weights_only_unpickler.py, Python's pickletools.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

# The file of a model's pickled weights, and the index if there are several files.
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")  # of all files that may be pickled weights
# Bytes of a pickle without the tensors' data. 200 per tensor are usual. The worst 4 MiB take some seconds and
# 300 MB of memory. A guess.
MAX_PICKLE_BYTES = 4 << 20
# Bytes of the list of entries in an archive. 100 per storage are usual, and ten times as many in memory.
MAX_DIRECTORY_BYTES = 16 << 20
MAX_DIMENSIONS, MAX_SIZE = 16, 1 << 63  # of a tensor; torch has 64 and the same
# Arguments of a function; `_rebuild_tensor_v2` has the most. A call of 5 bytes could repeat a tuple of millions, which
# is copied for each call: 4 MiB would take hours.
MAX_ARGUMENTS = 7
MAX_SHOWN = 100  # characters of a text of the file in an error
# Exceptions of zipfile and pickle for damaged content.
_OF_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, struct.error,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
# Storage classes, with torch's name of the type and the bytes of an element.
_STORAGES = {
    "DoubleStorage": ("float64", 8), "FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1),
}  # fmt: skip
_ORDERED_DICT = "collections.OrderedDict"
_TENSOR, _OLD_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_ALLOWED = {_ORDERED_DICT, _TENSOR, _OLD_TENSOR, *_PARAMETERS, *(f"torch.{name}" for name in _STORAGES)}


# The instructions of pickle protocol 2 that torch.save needs; PROTO has no effect.
_NEEDED = frozenset({
    "PROTO", "STOP", "GLOBAL", "BINPERSID", "REDUCE", "BUILD", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE",
    "EMPTY_LIST", "EMPTY_DICT", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING",
    "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SETITEM", "SETITEMS",
    "APPEND", "APPENDS",
})  # fmt: skip
_INSTRUCTIONS = {ord(instruction.code): instruction.name for instruction in pickletools.opcodes}


def _shown(text: str) -> str:
    """The beginning of a text that the file's author has chosen, for errors."""
    text = text[:MAX_SHOWN]
    return text if text.isprintable() else ascii(text)


class UnusablePickle(ValueError):
    """A pickle that needs more than tensors. The message continues a sentence about the file."""


class DamagedPickle(ValueError):
    """A file that is cut short or not of this format. The message continues a sentence about the file."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A function or class that a pickle refers to. A call returns what the result stands for."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        match arguments if len(arguments) <= MAX_ARGUMENTS else (None,):
            case () if self.name == _ORDERED_DICT:
                return {}
            case (_, _, _, _, *_) if self.name in (_TENSOR, _OLD_TENSOR):
                return _tensor(*arguments)
            case (PickledTensor() as data, *_) if self.name in _PARAMETERS:
                return data
        raise UnusablePickle("calls a function with other arguments than torch.save writes")


@dataclass(frozen=True, slots=True)
class _Storage:
    """Data of one or more tensors."""

    key: str
    dtype: str
    bytes: int

    @property
    def shown(self) -> str:
        """The name of its data for errors."""
        return f"data/{_shown(self.key)}"


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """One tensor of a file. Tensors with the same storage share data."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    bytes: int  # of its elements
    storage: str  # key of its data


def tensors(file: BinaryIO) -> Mapping[str, PickledTensor]:
    """Return the tensors of a file by name. Raise UnusablePickle or DamagedPickle."""
    try:
        is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        file.seek(0)
        return _of_archive(file) if is_zip else _of_legacy_file(file)
    except (UnusablePickle, DamagedPickle):
        raise
    except _OF_DAMAGE as error:
        raise DamagedPickle(f"is no complete file of torch.save ({type(error).__name__}: {error})") from None


class _LimitedFile:
    """A file whose reads are limited: zipfile reads the whole list of entries at once, whatever its size."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY_BYTES:
            raise UnusablePickle(f"has a list of entries of {size} bytes; at most {MAX_DIRECTORY_BYTES} are read")
        return self._file.read(MAX_DIRECTORY_BYTES if size < 0 else size)


def _of_archive(file: BinaryIO) -> Mapping[str, PickledTensor]:
    with zipfile.ZipFile(cast(BinaryIO, _LimitedFile(file))) as archive:
        listed = archive.infolist()
        entries = {entry.filename: entry for entry in listed}
        # torch takes the folder of the first entry, ignores case, and may take another one of two equal names.
        folder = listed[0].filename.partition("/")[0] + "/" if listed else ""
        entry = entries.get(f"{folder}data.pkl")
        if entry is None:
            raise DamagedPickle("is an archive without data.pkl, so torch.save has not written it")
        if len({name.casefold() for name in entries}) < len(listed):
            raise UnusablePickle("has two entries with the same name")
        # Compressed entries could be any size in memory; torch does not compress.
        if compressed := next((each for each in listed if each.compress_type != zipfile.ZIP_STORED), None):
            raise UnusablePickle(f"has a compressed entry, {compressed.filename[:100]!a}; torch.save compresses none")
        if entry.file_size > MAX_PICKLE_BYTES:
            raise UnusablePickle(f"has a pickle of {entry.file_size} bytes; at most {MAX_PICKLE_BYTES} are read")
        order = entries.get(f"{folder}byteorder")
        if order is not None and (order.file_size != len(b"little") or archive.read(order) != b"little"):
            raise UnusablePickle("was written on a machine of the other byte order")
        # Entries that overlap would be written out more often than they are stored.
        if sum(each.file_size for each in listed) > file.seek(0, io.SEEK_END):
            raise UnusablePickle("has entries that are larger than the file")
        found, storages = _state_dict(io.BytesIO(archive.read(entry)))
    for storage in storages.values():
        data = entries.get(f"{folder}data/{storage.key}")
        if data is None or data.file_size != storage.bytes:
            raise DamagedPickle(f"lacks {storage.bytes} bytes of {storage.shown}")
    return found


def _of_legacy_file(file: BinaryIO) -> Mapping[str, PickledTensor]:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    beginning = file.read(MAX_PICKLE_BYTES)
    pickles = io.BytesIO(beginning)
    head = [_TensorUnpickler(pickles).load(), _TensorUnpickler(pickles).load()] if beginning[:1] == b"\x80" else []
    if head != [_LEGACY_MAGIC, _LEGACY_VERSION]:
        raise DamagedPickle("is no file of torch.save")
    _TensorUnpickler(pickles).load()  # sizes of C types on the machine that wrote it
    found, storages = _state_dict(pickles)
    _TensorUnpickler(pickles).load()  # the keys of the storages in the order of their data
    # Before each storage's data is its number of elements, in 8 bytes.
    if pickles.tell() + sum(8 + storage.bytes for storage in storages.values()) != size:
        raise DamagedPickle(f"has {size} bytes, which is not what its pickle promises")
    return found


def _state_dict(pickle: BinaryIO) -> tuple[Mapping[str, PickledTensor], Mapping[str, _Storage]]:
    """Return the tensors of a pickled dictionary, and the storages."""
    unpickler = _TensorUnpickler(pickle)
    found = unpickler.load()
    if not isinstance(found, dict) or not found:
        raise UnusablePickle("holds no dictionary of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            raise UnusablePickle(f"holds {str(name)[:60]!r}, which is no tensor; save the model's state_dict alone")
    return found, unpickler.storages


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> PickledTensor:
    """Return the tensor that torch rebuilds from these arguments."""
    sizes = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
    # Without these limits the product of the sizes could take hours.
    if len(sizes) > 1 + 2 * MAX_DIMENSIONS or not isinstance(storage, _Storage):
        raise UnusablePickle("has a tensor of an unknown form")
    if not all(type(size) is int and 0 <= size < MAX_SIZE for size in sizes):
        raise UnusablePickle("has a tensor of an unknown form")
    if len(shape) != len(strides):
        raise DamagedPickle("has a tensor with other strides than dimensions")
    width = next(width for dtype, width in _STORAGES.values() if dtype == storage.dtype)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if prod(shape) and (last + 1) * width > storage.bytes:
        raise DamagedPickle(f"has a tensor beyond the end of {storage.shown}")
    if prod(shape) * width > storage.bytes:  # with strides of 0 a few bytes are a tensor of any size
        raise UnusablePickle(f"has a tensor that repeats the elements of {storage.shown}")
    return PickledTensor(storage.dtype, shape, prod(shape) * width, storage.key)


class _Instructions(dict[int, Any]):
    """The methods of `_TensorUnpickler` by code of the instruction. Any other instruction is an error."""

    def __missing__(self, code: int) -> Any:
        raise UnusablePickle(f"uses the pickle instruction {_INSTRUCTIONS[code]}, which could run code")


class _TensorUnpickler(pickle._Unpickler):
    """Reads one pickle of tensors, without calling a function that it names.

    The unpickler in Python and not the one in C: its memo is a dictionary. The one in C has an array, which one
    instruction can make 16 GB large.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]  # all values since the last mark

    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="latin-1")
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> _Name:
        full = f"{module}.{name}"
        if full not in _ALLOWED:
            raise UnusablePickle(f"needs {_shown(full)}, which could run code")
        return _Name(full)

    def persistent_load(self, id: Any) -> _Storage:
        match id:
            case ("storage", _Name(name), str(key), str(), int(elements), *_) if elements >= 0:
                dtype, width = _STORAGES[name.removeprefix("torch.")]
            case _:
                raise UnusablePickle("refers to something else than tensor data")
        storage = self.storages.setdefault(key, _Storage(key, dtype, elements * width))
        if storage != _Storage(key, dtype, elements * width):
            raise DamagedPickle(f"describes {storage.shown} in two ways")
        return storage

    def load_build(self) -> None:
        """Drop the attributes of the dictionary, such as the versions of modules."""
        if type(self.stack.pop()) is not dict or type(self.stack[-1]) is not dict:
            raise UnusablePickle("sets the state of an object")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        # Numbers could be chosen so that all have the same hash; each would be compared with each.
        if type(self.stack[-1]) is not dict or any(type(key) is not str for key in items[::2]):
            raise UnusablePickle("holds a dictionary whose keys are no texts")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch = _Instructions(
        {code: method for code, method in pickle._Unpickler.dispatch.items() if _INSTRUCTIONS[code] in _NEEDED}
        | {pickle.BUILD[0]: load_build, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}
    )
