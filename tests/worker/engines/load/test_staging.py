"""Promises of weights on their way to a device, kept within main memory by the same code: all bytes, each in its place,
through a few buffers, none of which is filled too early."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import tiny
from tests.worker.loaded import options
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.safetensors import WeightFile
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.load.staging import DeviceCopies, RingSize, move
from worker.errors import StartError
from worker.protocol.events import Exit

HERE = torch.device("cpu")


class Late(DeviceCopies):
    """Copies that finish only when they are waited for, so that a buffer filled again too early gives wrong bytes."""

    def __init__(self) -> None:
        super().__init__(HERE)
        self.on_the_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.begun = 0
        self.most = 0
        """Bytes that were on their way at once."""
        self._arrived = 0
        self._lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            self.on_the_way.append((target, source))
            self.begun += 1
            self.most = max(self.most, sum(source.nbytes for _, source in self.on_the_way))

    def mark(self) -> Callable[[], None]:
        upto = self.begun
        return lambda: self._arrive(upto)

    def end(self) -> None:
        self._arrive(self.begun)

    def _arrive(self, upto: int) -> None:
        with self._lock:
            while self._arrived < upto:
                target, source = self.on_the_way.pop(0)
                target.copy_(source)
                self._arrived += 1


class Holder(torch.nn.Module):
    """Has the tensors of a file as its parameters."""

    def __init__(self, file: WeightFile):
        super().__init__()
        for name, view in file.tensors():
            self.register_parameter(name, torch.nn.Parameter(view, requires_grad=False))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Tensors smaller and larger than a buffer of 4,096 bytes, of several types, one empty."""
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5000), "b": torch.randn(3), "c": torch.randn(1024), "d": torch.randint(0, 9, (7, 11)),
        "e": torch.randn(130, 33).bfloat16(), "f": torch.empty(0, 4), "g": torch.randn(1, 1, 4097).half(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("buffers", [1, 2, 7])
def test_every_byte_arrives_in_its_place_however_many_read(
    buffers: int, readers: int, stored: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, tensors = stored
    file, copies, reported = WeightFile(path), Late(), list[int]()
    model = Holder(file)
    move(model, [file], HERE, reported.append, copies=copies, size=RingSize(buffers, 4096, readers))
    file.keep_only(frozenset())
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters() if parameter.numel())
    assert all(file.offset(parameter) is None for parameter in model.parameters() if parameter.numel())
    assert reported == sorted(reported)
    assert reported[-1] == sum(tensor.nbytes for tensor in tensors.values())
    assert copies.most <= buffers * 4096


def test_adjacent_tensors_are_read_together(tmp_path: Path) -> None:
    tensors = {f"t{number:02}": torch.full((256,), float(number)) for number in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    file = WeightFile(tmp_path / "model.safetensors")
    model, reported = Holder(file), list[int]()
    move(model, [file], HERE, reported.append, size=RingSize(2, 8192, readers=1))
    assert reported == [8192, 16384]
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


def test_tied_weights_stay_tied_and_buffers_are_moved_too(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = WeightFile(stored[0])
    model = Holder(file)
    model.tied = model.get_parameter("a")
    model.register_buffer("view", model.get_parameter("c").detach(), persistent=False)
    model.register_buffer("made", torch.arange(3000))
    model.register_buffer("turned", torch.randn(6, 4).t())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    turned = model.get_buffer("turned").clone()
    move(model, [file], HERE, size=RingSize(2, 4096))
    view = model.get_buffer("view")
    assert model.tied is model.get_parameter("a")
    assert view.data_ptr() == model.get_parameter("c").data_ptr()
    assert file.offset(view) is None
    assert torch.equal(model.get_buffer("turned"), turned)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_file_that_became_shorter_is_refused_and_the_model_stays_as_it_was(
    stored: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = stored
    file = WeightFile(path)
    model = Holder(file)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    os.truncate(path, file.size - 4096)
    with pytest.raises(StartError, match="it has become shorter; download it again") as error:
        move(model, [file], HERE, size=RingSize(2, 4096))
    assert error.value.exit == Exit.DAMAGED
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def test_an_aborted_load_leaves_no_copy_running(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    class Enough(Exception):
        pass

    def report(done: int) -> None:
        if done > 10_000:
            raise Enough

    gc.collect()  # what other tests have mapped has a descriptor each
    file, copies = WeightFile(stored[0]), Late()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Enough):
        move(Holder(file), [file], HERE, report, copies=copies, size=RingSize(2, 4096))
    assert copies.on_the_way == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lane_that_breaks_down_breaks_the_load(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    class Broken(DeviceCopies):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    file = WeightFile(stored[0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        move(Holder(file), [file], HERE, copies=Broken(HERE), size=RingSize(2, 4096))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


@pytest.mark.slow
def test_main_memory_holds_the_ring_and_no_more(tmp_path: Path) -> None:
    """The target, which would be the device's, is measured first; the file is 80 MiB, the ring 1 MiB."""
    # glibc gives memory of more than 32 MiB back at once, whatever came before (M_MMAP_THRESHOLD of mallopt(3)).
    save_file({"a": torch.ones(40 << 18), "b": torch.ones(40 << 18)}, tmp_path / "model.safetensors")
    file = WeightFile(tmp_path / "model.safetensors")
    model = Holder(file)
    gc.collect()
    before, most = anonymous(), list[int]()
    move(model, [file], HERE, lambda done: most.append(anonymous() - before - done), size=RingSize(4, 1 << 18))
    assert max(most) < 8 << 20
    del model
    assert anonymous() - before < 8 << 20, "the ring is given back"


def test_a_model_copied_through_the_ring_gives_the_same_logits(tmp_path: Path) -> None:
    asked = options(tiny.make("gemma3_text", tmp_path / "model", tie_word_embeddings=True))
    config = load_config(asked)
    usual = loader.load_model(asked, config, None, lambda event: None).model
    built = loader.build(asked, config, None)
    assert built is not None
    reported: list[int] = []
    over: list[str] = []
    load = loader.WeightLoad(asked, config, HERE, None, False, lambda event: reported.append(event.done), over.append)
    model = load.copy_to_devices(built.model, built.files)
    assert over == ["read", "copy"]
    ids = torch.tensor([[9, 41, 70, 77]])
    assert torch.equal(model(ids).logits, usual(ids).logits)
    assert reported == sorted(reported)
    assert reported[-1] == sum(file.size for file in built.files)
