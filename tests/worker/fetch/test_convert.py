"""Converted snapshots: same output as the original, mapped without conversion, complete or absent."""

import fcntl
import os
import queue
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from router.memory import checkpoint
from tests import tiny
from tests.pickled import Command, pickle_weights, poison
from tests.worker.loaded import complete_one, load, options, serving, shard
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.snapshot import load_config
from worker.errors import StartError
from worker.fetch import convert as conversion
from worker.fetch.convert import check_disk_space
from worker.fetch.tensor_writer import TensorWriter
from worker.protocol.argv import Convert
from worker.protocol.events import PERMANENT_EXITS, Converted, Event, Exit, Progress
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX
from worker.protocol.snapshot_files import MANIFEST, ConversionManifest, decode_manifest

PROMPT = (9, 41, 70, 77, 80)
# families whose checkpoints store experts one by one
STACKED = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "jamba", "olmoe", "phimoe")
NOT_CONVERTED = ("llama", "gpt2", "gpt_oss", "dbrx", "llama4_text", "bert-embed")


def convert(snapshot: Path, target: Path) -> Converted:
    return conversion.convert(Convert(snapshot=str(snapshot), target=str(target)), lambda event: None)


def manifest(target: Path) -> ConversionManifest:
    return decode_manifest((target / MANIFEST).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("family", STACKED)
async def test_a_converted_snapshot_has_the_weights_and_the_output_of_the_original(family: str, tmp_path: Path) -> None:
    stored = "bfloat16" if STACKED.index(family) % 2 else "float32"
    snapshot, target = tiny.make(family, tmp_path / "original", dtype=stored), tmp_path / "converted"
    converted = convert(snapshot, target)
    assert converted.weights == sum(each.nbytes for each in load_file(target / "model.safetensors").values())
    found = []
    for folder in (snapshot, target):
        async with serving(load(folder, ctx_size=64, parallel=1)) as engine:
            found.append((await complete_one(engine, PROMPT, max_tokens=24)).tokens)
    assert found[0] == found[1]
    config = load_config(options(snapshot))
    models = [loader.load_model(options(folder), config, None, lambda _: None).model for folder in (snapshot, target)]
    original, ours = (model.state_dict() for model in models)
    assert original.keys() == ours.keys()
    assert all(
        torch.equal(tensor, ours[name]) and tensor.dtype == ours[name].dtype for name, tensor in original.items()
    )


def test_a_load_maps_the_weights_of_a_converted_snapshot(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "converted"
    assert loader.build(options(snapshot), load_config(options(snapshot)), None) is None, "needs conversion"
    convert(snapshot, target)
    built = loader.build(options(target), load_config(options(target)), None)
    assert built is not None
    [file] = built.files
    begin = file.bytes.data_ptr()
    assert all(begin <= each.data_ptr() < begin + file.size for each in built.model.parameters())


@pytest.mark.parametrize("family", NOT_CONVERTED)
def test_weights_that_load_without_conversion_are_not_copied(family: str, tmp_path: Path) -> None:
    snapshot, target = tiny.make(family, tmp_path / "original"), tmp_path / "converted"
    assert convert(snapshot, target) == Converted(weights=0)
    assert [path.name for path in target.iterdir()] == [MANIFEST]
    assert manifest(target) == ConversionManifest(source=str(snapshot), files={})


def test_other_files_are_linked_and_the_snapshot_is_unchanged(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "converted"
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in snapshot.iterdir()}
    snapshot.chmod(0o555)
    convert(snapshot, target)
    snapshot.chmod(0o755)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in snapshot.iterdir()} == before
    made = {path.name for path in target.iterdir() if not path.is_symlink()}
    assert made == {"model.safetensors", MANIFEST}
    assert (target / "config.json").resolve() == (snapshot / "config.json").resolve()
    facts = (target / "model.safetensors").stat()
    assert manifest(target).files == {"model.safetensors": [facts.st_size, facts.st_mtime_ns]}


def test_shards_become_one_file(tmp_path: Path) -> None:
    snapshot, target = tiny.make("qwen3_moe", tmp_path / "original"), tmp_path / "converted"
    shard(snapshot)
    convert(snapshot, target)
    assert sorted(path.name for path in target.glob("*.safetensors*")) == ["model.safetensors"]
    assert loader.build(options(target), load_config(options(target)), None) is not None


def test_weights_that_would_lose_precision_are_not_converted(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original", dtype="bfloat16"), tmp_path / "converted"
    tensors = load_file(snapshot / "model.safetensors")
    name = next(name for name in tensors if name.endswith("block_sparse_moe.gate.weight"))
    save_file(tensors | {name: tensors[name].float()}, snapshot / "model.safetensors")
    with pytest.raises(StartError, match=r"float32, which a copy would convert to torch\.bfloat16"):
        convert(snapshot, target)
    assert list(tmp_path.iterdir()) == [snapshot]


def test_the_rest_of_a_killed_conversion_is_replaced(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "converted"
    part = tmp_path / "converted.part"
    (part / "trial").mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half of it")
    (part / "tokenizer.json").symlink_to("/nowhere")
    convert(snapshot, target)
    assert not part.exists()
    assert not (target / "trial").exists()
    assert loader.build(options(target), load_config(options(target)), None) is not None


def test_only_one_conversion_runs_at_a_time(tmp_path: Path) -> None:
    """While another process converts in the same folder, a conversion writes nothing and reports that one's bytes."""
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "state" / "converted"
    others = target.with_name("other.part") / "model.safetensors"
    others.parent.mkdir(parents=True)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    command = Convert(snapshot=str(snapshot), target=str(target))
    running = threading.Thread(target=conversion.convert, args=(command, events.put))
    other = os.open(target.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        running.start()
        assert events.get(timeout=60) == Progress(stage="convert", done=0)
        others.write_bytes(b"12345")
        while events.get(timeout=60) != Progress(stage="convert", done=5):
            pass
        assert [path.name for path in target.parent.iterdir()] == ["other.part"]
    finally:
        os.close(other)
        running.join()
    assert (target / "model.safetensors").exists()


def test_an_existing_target_is_not_converted_again(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "converted"
    convert(snapshot, target)
    before = (target / "model.safetensors").stat().st_ino
    assert convert(snapshot, target).weights == 0
    assert (target / "model.safetensors").stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "original"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    snapshot, target = tiny.make("mixtral", tmp_path / "original"), tmp_path / "converted"

    def fail(event: Event) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        conversion.convert(Convert(snapshot=str(snapshot), target=str(target)), fail)
    assert list(tmp_path.iterdir()) == [snapshot]


def test_a_full_disk_is_reported_before_anything_is_written() -> None:
    check_disk_space(Path("/disk"), free=(2 << 30) + 1, size=1 << 30)
    with pytest.raises(StartError, match="/disk has 2048 MiB free; the converted weights need 1025 MiB") as full:
        check_disk_space(Path("/disk"), free=2 << 30, size=(1 << 30) + (1 << 20))
    assert str(full.value).endswith("make room there, or give the router another --state-dir")
    assert full.value.exit == Exit.DISK_FULL


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out_that_is_not_tried_again(tmp_path: Path) -> None:
    snapshot, state = pickle_weights(tiny.make("llama", tmp_path / "original")), tmp_path / "state"
    state.write_text("a file, below which root cannot make a folder either")
    with pytest.raises(
        StartError, match=r"/state/converted cannot be created \(Not a directory\), .* another --state-dir"
    ) as refused:
        convert(snapshot, state / "converted" / "m")
    assert refused.value.exit in PERMANENT_EXITS


def test_a_damaged_snapshot_is_rejected_as_by_a_load(tmp_path: Path) -> None:
    snapshot = tiny.make("mixtral", tmp_path / "original")
    os.truncate(snapshot / "model.safetensors", 100_000)
    with pytest.raises(StartError) as refused:
        convert(snapshot, tmp_path / "converted")
    assert refused.value.exit == Exit.DAMAGED
    assert list(tmp_path.iterdir()) == [snapshot]


def test_the_tensor_writer_writes_valid_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.int64), "c": torch.randn(2, 2).bfloat16().t()}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5)}
    with TensorWriter(path, len(tensors), lambda done: None) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        assert writer.finish({}) == sum(tensor.nbytes for tensor in tensors.values())
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found.keys() == tensors.keys()


# Pickled weights


def names_in(target: Path) -> set[str]:
    return set(load_file(target / "model.safetensors"))


@pytest.mark.parametrize(
    ("family", "shards", "legacy"),
    [("llama", 1, False), ("llama", 3, False), ("gpt2", 1, True), ("mixtral", 2, False), ("bert-embed", 1, False)],
)
async def test_pickled_weights_give_the_same_output_as_safetensors(
    family: str, shards: int, tmp_path: Path, *, legacy: bool
) -> None:
    original, target = tiny.make(family, tmp_path / "original", dtype="bfloat16"), tmp_path / "converted"
    snapshot = pickle_weights(shutil.copytree(original, tmp_path / "pickled"), shards=shards, legacy=legacy)
    converted = convert(snapshot, target)
    assert converted.weights == sum(each.nbytes for each in load_file(target / "model.safetensors").values())
    assert not any(path.suffix == ".bin" or path.name == PICKLED_INDEX for path in target.iterdir())
    if family == "mixtral":
        assert loader.build(options(target), load_config(options(target)), None) is not None, "experts are stacked, too"
    else:
        assert names_in(target) == names_in(original)
    if family == "bert-embed":
        return
    found = []
    for folder in (original, target):
        async with serving(load(folder, ctx_size=64, parallel=1)) as engine:
            found.append((await complete_one(engine, PROMPT, max_tokens=24)).tokens)
    assert found[0] == found[1]


def test_one_copy_of_tied_weights_is_written(tmp_path: Path) -> None:
    embedding = "model.embed_tokens.weight"
    for tied, names in ((True, 0), (False, 1)):
        snapshot = tiny.make("llama", tmp_path / f"original-{tied}", tie_word_embeddings=tied)
        original = set(load_file(snapshot / "model.safetensors")) - {"lm_head.weight"}
        target = tmp_path / f"converted-{tied}"
        convert(pickle_weights(snapshot, shared={"lm_head.weight": embedding}), target)
        assert names_in(target) == original | ({"lm_head.weight"} if names else set())
        assert checkpoint.read(snapshot).params == checkpoint.read(target).params


def test_views_are_written_apart(tmp_path: Path) -> None:
    snapshot, target = tiny.make("llama", tmp_path / "original"), tmp_path / "converted"
    before = load_file(snapshot / "model.safetensors")
    name, other = [name for name in before if name.endswith(("q_proj.weight", "o_proj.weight"))][:2]
    both = torch.cat([before[name], before[other]])
    rows = len(before[name])
    views = {**before, name: both[:rows], other: both[rows:].t().contiguous().t()}
    torch.save(views, snapshot / PICKLED)
    (snapshot / "model.safetensors").unlink()
    convert(snapshot, target)
    after = load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_pickle_that_could_run_code_is_rejected_and_not_executed(tmp_path: Path) -> None:
    snapshot = poison(tiny.make("llama", tmp_path / "original"), tmp_path / "trace")
    with pytest.raises(StartError, match=r"pytorch_model\.bin needs .*\.open, which could run code") as refused:
        convert(snapshot, tmp_path / "converted")
    assert refused.value.exit == Exit.UNUSABLE
    assert list(tmp_path.iterdir()) == [snapshot]


def test_torch_refuses_such_a_pickle_as_well(tmp_path: Path) -> None:
    """A pickle that the check would let through still runs no code."""
    poison(tmp_path, tmp_path / "trace")
    with pytest.raises(StartError, match=r"cannot be read by torch\.load\(weights_only=True\)"):
        conversion._loaded(tmp_path / PICKLED)
    assert not (tmp_path / "trace").exists()


def test_disk_space_is_checked_for_each_tensor_that_shares_data(tmp_path: Path) -> None:
    snapshot = tiny.make("llama", tmp_path / "original")
    data = torch.zeros(1 << 20)
    torch.save({f"w{number}": data[number:] for number in range(1000)}, snapshot / PICKLED)
    (snapshot / "model.safetensors").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 3 << 30))
        with pytest.raises(StartError, match=r"the converted weights need 399\d MiB") as refused:
            convert(snapshot, tmp_path / "converted")
    assert refused.value.exit == Exit.DISK_FULL
    assert list(tmp_path.iterdir()) == [snapshot]


def test_no_file_is_overwritten_through_a_link_of_the_snapshot(tmp_path: Path) -> None:
    snapshot, mine = pickle_weights(tiny.make("llama", tmp_path / "original")), tmp_path / "mine"
    mine.write_text("text")
    (snapshot / MANIFEST).symlink_to(mine)
    convert(snapshot, tmp_path / "converted")
    assert mine.read_text() == "text"
    assert manifest(tmp_path / "converted").source == str(snapshot)


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    snapshot = tiny.make("llama", tmp_path / "original")
    torch.save({"x": Command(tmp_path / "trace")}, snapshot / PICKLED)
    assert convert(snapshot, tmp_path / "converted").weights == 0
    assert not (tmp_path / "trace").exists()


def test_a_missing_part_of_pickled_weights_is_damage(tmp_path: Path) -> None:
    snapshot = pickle_weights(tiny.make("llama", tmp_path / "original"), shards=2)
    (snapshot / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(StartError, match=r"pytorch_model-00002-of-00002\.bin is missing") as refused:
        convert(snapshot, tmp_path / "converted")
    assert refused.value.exit == Exit.DAMAGED
