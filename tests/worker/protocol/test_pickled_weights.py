"""Files of torch.save: their tensors are read without executing the pickle, and anything else is rejected by name."""

import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol import pickled_weights
from worker.protocol.pickled_weights import MAX_PICKLE_BYTES, DamagedPickle, PickledTensor, UnusablePickle, tensors

SHARED = torch.arange(12, dtype=torch.float32).reshape(3, 4)
WEIGHTS = {
    "plain": torch.randn(2, 3), "half": torch.zeros(5).half(), "brain": torch.zeros(1, 7).bfloat16(),
    "whole": torch.arange(4), "flags": torch.tensor([True, False]), "none": torch.empty(0, 4), "one": torch.tensor(2.5),
    "shared": SHARED, "view": SHARED[1:], "turned": SHARED.t(),
}  # fmt: skip


def saved(value: Any, *, legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def read(content: bytes) -> dict[str, PickledTensor]:
    return dict(tensors(io.BytesIO(content)))


def refuses(content: bytes, message: str, error: type[Exception] = UnusablePickle) -> None:
    with pytest.raises(error, match=message):
        read(content)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        WEIGHTS,
        OrderedDict(WEIGHTS),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        dict(torch.nn.Linear(3, 2).named_parameters()),
    ],
)
def test_the_tensors_are_those_that_torch_loads(value: dict[str, torch.Tensor], *, legacy: bool) -> None:
    found = read(saved(value, legacy=legacy))
    loaded = torch.load(io.BytesIO(saved(value, legacy=legacy)), weights_only=True)
    assert list(found) == list(loaded)
    for name, tensor in loaded.items():
        assert (f"torch.{found[name].dtype}", found[name].shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert found[name].bytes == tensor.numel() * tensor.element_size()
    same = {name: found[name].storage for name in ("shared", "view", "turned") if name in found}
    assert len(set(same.values())) <= 1


class Command:
    """An object whose unpickling runs a command."""

    def __init__(self, function: Any, *arguments: Any):
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Command(os.system, "touch hacked"), r"needs posix\.system, which could run code"),
        (Command(eval, "1"), r"needs (__builtin__|builtins)\.eval"),
        (Command(shutil.rmtree, "/nowhere"), r"needs shutil\.rmtree"),
        ({"w": torch.zeros(1), "x": Command(os.getcwd)}, r"needs posix\.getcwd"),
        ({"w": torch.zeros(1), "epoch": 3}, "holds 'epoch', which is no tensor; save the model's state_dict alone"),
        ({"model": {"w": torch.zeros(1)}}, "holds 'model', which is no tensor"),
        ([torch.zeros(1)], "holds no dictionary of tensors"),
        ({}, "holds no dictionary of tensors"),
        ({(1, 2): torch.zeros(1)}, "whose keys are no texts"),
        (torch.nn.Linear(2, 2), r"needs torch\.nn\.modules\.linear\.Linear"),
        ({"w": torch.zeros(2).to_sparse()}, r"needs torch\._utils\._rebuild_sparse_tensor"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_rejected_by_name(
    value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(saved(value, legacy=legacy), message)
    assert list(tmp_path.iterdir()) == []


def archive(program: bytes, *, data: bytes = bytes(8), compressed: bool = False) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as made:
        made.writestr("a/data.pkl", program)
        made.writestr("a/data/0", data)
    return file.getvalue()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x02tQK%bK%b\x85K\x01\x85\x89}tR"
)


def of_one_tensor(offset: int = 0, size: int = 2) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00w" + TENSOR % (bytes([offset]), bytes([size])) + b"s."


def test_a_tensor_lies_within_its_data() -> None:
    assert read(archive(of_one_tensor())) == {"w": PickledTensor("float32", (2,), 8, "0")}
    assert read(archive(of_one_tensor(offset=1, size=1)))["w"].bytes == 4
    refuses(archive(of_one_tensor(offset=1)), "beyond the end of data/0", DamagedPickle)
    refuses(archive(of_one_tensor(), data=bytes(7)), "lacks 8 bytes of data/0", DamagedPickle)


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_no_instruction_beyond_those_of_weights_only_is_accepted(protocol: int) -> None:
    program = pickle.dumps({"w": OrderedDict(), "x": Command(os.getcwd)}, protocol=protocol)
    refuses(archive(program), "which could run code")


@pytest.mark.parametrize(
    "instruction", [b"i__builtin__\neval\n", b"\x81", b"o", b"\x82\x01", b"\x93", b"\x97", b"P0\n", b"I1\n", b"\x8f"]
)
def test_an_instruction_that_makes_objects_is_rejected(instruction: bytes) -> None:
    refuses(archive(b"\x80\x02}(" + instruction + b"."), "uses the pickle instruction")


def test_a_pickle_of_any_size_takes_bounded_memory() -> None:
    refuses(archive(bytes(MAX_PICKLE_BYTES + 1)), f"at most {MAX_PICKLE_BYTES} are read")
    refuses(archive(of_one_tensor(), compressed=True), r"has a compressed entry, 'a/data\.pkl'")
    put_far_away = b"\x80\x02}r\xff\xff\xff\xff"  # Python's own unpickler would take 32 GB for this index
    refuses(archive(put_far_away + b"."), "holds no dictionary of tensors")


BIG = b"\x8a\xff" + b"\x7f" * 255  # a number of 255 bytes


@pytest.mark.parametrize(
    "dimensions",
    [b"K\x01q\x00" + b"h\x00" * 500_000, BIG + b"q\x00" + b"h\x00" * 500_000, BIG],
    ids=["many", "many large", "one large"],
)
def test_the_sizes_of_a_tensor_are_limited_before_they_are_multiplied(dimensions: bytes) -> None:
    beginning, end = TENSOR.split(b"K%b\x85K\x01\x85")
    tensor = beginning % b"\x00" + b"(" + dimensions + b"tq\x01h\x01" + end
    refuses(archive(b"\x80\x02}X\x01\x00\x00\x00w" + tensor + b"s."), "has a tensor of an unknown form")


def test_the_arguments_of_a_call_are_limited_so_that_repeating_it_costs_little() -> None:
    function, arguments = (TENSOR % (b"\x00", b"\x02")).removesuffix(b"tR").split(b"(", 1)
    for further in (2, 1_000_000):
        call = function + b"(" + arguments + b"N" * further + b"tR"
        content = archive(b"\x80\x02}X\x01\x00\x00\x00w" + call + b"s.")
        refuses(content, "other arguments")


def test_an_error_shows_the_printable_beginning_of_a_key() -> None:
    key = "\x1b[31m\n" + 1000 * "k"
    tensor = TENSOR.replace(b"X\x01\x00\x00\x000", pickle.dumps(key, protocol=2)[2:].partition(b"q\x00")[0])
    with pytest.raises(DamagedPickle, match=r"data/'\\x1b\[31m\\nk+'$") as caught:
        read(archive(b"\x80\x02}X\x01\x00\x00\x00w" + tensor % (b"\x01", b"\x02") + b"s."))
    assert len(str(caught.value)) < 200


def test_a_tensor_has_no_more_elements_than_its_data() -> None:
    many = torch.zeros(1).expand(1 << 40)
    refuses(saved({"w": many}), "repeats the elements of data/0")
    assert read(saved({"w": torch.arange(4).expand(1, -1)}))["w"].shape == (1, 4)


def test_keys_that_could_all_have_the_same_hash_are_rejected() -> None:
    refuses(saved({2**61 - 1: torch.zeros(1)}), "whose keys are no texts")


def with_entries(*entries: tuple[str, bytes], compressed: bool = False) -> bytes:
    """An archive of one tensor with further entries behind those of torch.save."""
    file = io.BytesIO(archive(of_one_tensor()))
    with zipfile.ZipFile(file, "a") as made:
        for name, content in entries:
            made.writestr(name, content, zipfile.ZIP_LZMA if compressed else zipfile.ZIP_STORED)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_entries(("a/byteorder", bytes(1000)), compressed=True), "has a compressed entry, 'a/byteorder'"),
        (with_entries(("a/byteorder", b"little" * 100)), "of the other byte order"),
        (with_entries(("a/DATA.pkl", b"")), "has two entries with the same name"),
    ],
)
def test_an_archive_that_torch_could_read_otherwise_is_rejected(content: bytes, message: str) -> None:
    refuses(content, message)


def test_the_pickle_is_that_of_the_folder_that_torch_takes() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("b/version", b"3")
    with zipfile.ZipFile(file, "a") as made:
        made.writestr("a/data.pkl", of_one_tensor())
        made.writestr("a/data/0", bytes(8))
    refuses(file.getvalue(), r"without data\.pkl", DamagedPickle)


def test_a_long_list_of_entries_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_weights, "MAX_DIRECTORY_BYTES", 1000)
    assert read(archive(of_one_tensor()))
    many = [(f"a/{number:0100}", b"") for number in range(10)]
    refuses(with_entries(*many), r"has a list of entries of \d+ bytes")


def test_entries_that_overlap_are_rejected() -> None:
    more = with_entries(("a/data/1", bytes(8)))
    assert len(read(more)) == 1
    # Its last entry now states far more bytes than there are.
    last = more.rindex(b"PK\x01\x02")
    changed = bytearray(more)
    changed[last + 20 : last + 28] = (1 << 20).to_bytes(4, "little") * 2
    refuses(bytes(changed), "larger than the file")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_cut_short_is_damaged(*, legacy: bool) -> None:
    content = saved(WEIGHTS, legacy=legacy)
    for size in (0, 1, 3, 100, len(content) // 2, len(content) - 1):
        with pytest.raises(DamagedPickle):
            read(content[:size])


@given(content=st.binary(max_size=200), where=st.integers(0, 2000), legacy=st.booleans())
def test_no_content_raises_another_error(content: bytes, where: int, *, legacy: bool) -> None:
    whole = saved({"w": torch.zeros(2), "v": torch.zeros(3, 1)}, legacy=legacy)
    where %= len(whole)
    for damaged in (content, b"PK\x03\x04" + content, whole[:where] + content + whole[where + len(content) :]):
        try:
            found = read(damaged)
        except (UnusablePickle, DamagedPickle):
            continue
        assert all(isinstance(tensor, PickledTensor) for tensor in found.values())


PIECES = [
    *(bytes([code]) for code in b"})]([tsuRbQaeN.\x85\x86\x87"), b"K\x01", b"q\x00", b"h\x00",
    b"X\x01\x00\x00\x00w", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", TENSOR % (b"\x00", b"\x02"),
]  # fmt: skip


@given(program=st.lists(st.sampled_from(PIECES), max_size=30))
def test_no_program_of_allowed_instructions_raises_another_error(program: list[bytes]) -> None:
    try:
        read(archive(b"\x80\x02" + b"".join(program) + b"."))
    except (UnusablePickle, DamagedPickle):
        return
