"""Selection of files of a repository, and checks of complete files. Transfers are tested in
tests/processes/test_worker_program_download.py.
"""

import io
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import StartError
from worker.fetch.download import download, wanted
from worker.fetch.hub_cache import RemoteFile, RepoCache, safetensors_fault
from worker.fetch.transfer import READ_BYTES, Content
from worker.protocol.argv import Download
from worker.protocol.events import Exit

HASH = "0" * 40
NEEDED = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "modules.json",
    "additional_chat_templates/rag.jinja", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense_1024/config.json",
    "3_Dense/pytorch_model.bin", "modeling_mine.py", "qwen.tiktoken", "tekken.json", "source.spm", "bpe.codes",
}  # fmt: skip
UNNEEDED = {
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.fp16.safetensors", "consolidated.safetensors",
    "original/model.safetensors", "onnx/model.onnx", "onnx/config.json", "README.md", "tf_model.h5", ".gitattributes",
    "2_Dense/pytorch_model.bin", "training_args.bin", "model-q4.gguf", "flax_model.msgpack", "../config.json",
    "/etc/passwd.json", "runs/events.json",
}  # fmt: skip


def listed(*paths: str) -> dict[str, RemoteFile]:
    return {path: RemoteFile(path, 1, HASH) for path in paths}


def safetensors(tensors: dict[str, int], data: int) -> bytes:
    """A file whose header gives each tensor so many bytes, followed by `data` bytes."""
    entries, end = {}, 0
    for name, size in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    header = json.dumps({**entries, "__metadata__": {"format": "pt"}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data)


def fault_of(content: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        return safetensors_fault(Path(file.name))


def test_only_files_that_serving_needs_are_fetched() -> None:
    small, main = wanted("o/n", listed(*NEEDED, *UNNEEDED, "model.safetensors"))
    assert {file.path for file in small} == NEEDED
    assert main == "model.safetensors"


def test_a_single_file_is_preferred_to_shards_as_transformers_does() -> None:
    index = "model.safetensors.index.json"
    assert wanted("o/n", listed("config.json", index)) == (list(listed("config.json", index).values()), index)
    small, main = wanted("o/n", listed("config.json", "model.safetensors", index))
    assert [file.path for file in small] == ["config.json"]
    assert main == "model.safetensors"


def test_pickled_weights_are_fetched_only_if_there_are_no_others() -> None:
    index, pickled = "pytorch_model.bin.index.json", "pytorch_model.bin"
    assert wanted("o/n", listed("config.json", index))[1] == index
    small, main = wanted("o/n", listed("config.json", pickled, index))
    assert ([file.path for file in small], main) == (["config.json"], pickled)
    assert wanted("o/n", listed("config.json", pickled, "model.safetensors.index.json"))[1] != pickled


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["README.md"], "o/n has no config.json"),
        (
            ["m.gguf"],
            "o/n has no config.json; it has GGUF files: GGUF needs the llama-server engine, which this version does not"
            " offer; choose the original repository of the model, with",
        ),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "o/n has no config.json; it is an adapter: serve the model",
        ),
        (["params.json", "consolidated.safetensors"], "o/n has no config.json; it has Mistral's own format; choose"),
        (
            ["0_Transformer/config.json"],
            "o/n has no config.json; the model is in 0_Transformer; a newer sentence-trans",
        ),
        (["config.json", "model.pt"], "o/n has no model.safetensors and no pytorch_model.bin, only model.pt"),
        (["config.json"], "o/n has no model.safetensors; choose"),
    ],
)
def test_a_repository_that_cannot_be_served_is_rejected_with_the_reason(paths: list[str], message: str) -> None:
    with pytest.raises(StartError) as caught:
        wanted("o/n", listed(*paths))
    assert str(caught.value).startswith(message)
    assert caught.value.exit == Exit.UNUSABLE


@given(tensors=st.dictionaries(st.text(max_size=5), st.integers(0, 100), max_size=5), more=st.integers(-3, 3))
def test_a_safetensors_file_is_complete_only_with_the_size_of_its_header(tensors: dict[str, int], more: int) -> None:
    tensors.pop("__metadata__", None)
    stated = sum(tensors.values())
    actual = max(0, stated + more)
    assert (fault_of(safetensors(tensors, actual)) == "") == (actual == stated)


@given(st.binary(max_size=60))
def test_no_content_makes_the_header_check_fail(content: bytes) -> None:
    assert isinstance(fault_of(content), str)


def test_a_snapshot_is_complete_only_with_config_tokenizer_and_every_shard(tmp_path: Path) -> None:
    commit = "a" * 40
    cache = RepoCache(tmp_path, "o/n")
    folder = cache.snapshot(commit)
    folder.mkdir(parents=True)
    assert cache.complete_snapshot(commit) is None
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    for name, content in {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": safetensors({"w": 3}, 3),
    }.items():
        (folder / name).write_bytes(content)
        assert cache.complete_snapshot(commit) is None
    (folder / "model-2.safetensors").write_bytes(safetensors({"v": 3}, 3))
    assert cache.complete_snapshot(commit) == folder
    assert cache.complete_snapshot("main") is None, "main has no commit yet"
    cache.name_revision("main", commit)
    assert cache.complete_snapshot("main") == folder
    (folder / "tokenizer.json").unlink()
    assert cache.complete_snapshot("main") is None


def test_a_damaged_file_in_the_cache_is_removed_with_its_content(tmp_path: Path) -> None:
    cache = RepoCache(tmp_path, "o/n")
    file = RemoteFile("model.safetensors", 5, HASH)
    cache.blob(file).parent.mkdir(parents=True)
    cache.blob(file).write_bytes(b"short")
    cache.link(file, "b" * 40)
    assert cache.snapshot("b" * 40).joinpath("model.safetensors").read_bytes() == b"short"
    assert cache.complete_snapshot("b" * 40) is None
    assert not cache.has(file)
    assert list(cache.snapshot("b" * 40).iterdir()) == []


def test_a_failed_revision_name_leaves_no_temporary_file(tmp_path: Path) -> None:
    """Such a file would look like a revision, and the files of the model would be kept for it."""
    cache = RepoCache(tmp_path, "o/n")
    (cache.folder / "refs" / "main").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        cache.name_revision("main", "a" * 40)
    assert [file.name for file in (cache.folder / "refs").iterdir()] == ["main"]


def test_an_unwritable_demo_folder_is_reported_with_the_remedy() -> None:
    with pytest.raises(StartError, match=r"^/sys/demo cannot be written \(.*\): let .*, or give another --state-dir$"):
        download(Download(demo="a", target="/sys/demo"), print, token=None)


def test_disk_space_of_another_download_is_not_reserved_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    large, small = RemoteFile("a", 1000 << 20, "1" * 40), RemoteFile("b", 128 << 20, "2" * 40)
    with RepoCache(tmp_path, "o/a").reserved_space([large]):
        with pytest.raises(StartError, match=r"o/b needs 128 MiB more .* 1024 MiB are free, of which .* 1000") as full:
            RepoCache(tmp_path, "o/b").reserved_space([small]).__enter__()
        assert full.value.exit == Exit.DISK_FULL
    with RepoCache(tmp_path, "o/b").reserved_space([small]):
        pass


def test_a_lack_of_less_than_a_mib_of_disk_is_stated_in_kib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=40 << 10))
    with pytest.raises(StartError, match=r"o/a needs 80 KiB more .* 40 KiB are free; free space"):
        RepoCache(tmp_path, "o/a").reserved_space([RemoteFile("a", 80 << 10, "1" * 40)]).__enter__()


def test_hashing_a_partial_file_is_reported_piece_by_piece(tmp_path: Path) -> None:
    """Reading many gigabytes takes minutes, and the router ends a download that is silent for a minute."""
    (tmp_path / "part").write_bytes(bytes(3 * READ_BYTES + 5))
    read: list[int] = []
    with io.FileIO(tmp_path / "part", "ab+") as file:
        content = Content(RemoteFile("x", 4 * READ_BYTES, "0" * 64), file, read.append)
    assert read == [READ_BYTES] * 3 + [5]
    assert content.size == sum(read)


@pytest.mark.parametrize("revision", ["../../x", "/abs", "a/../b", "", "-x", "a b"])
def test_a_revision_cannot_leave_the_cache(tmp_path: Path, revision: str) -> None:
    with pytest.raises(StartError, match="no name of a revision"):
        download(Download(repo="o/n", revision=revision, cache=str(tmp_path)), lambda event: None, token=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [Download(), Download(repo="o/n", demo="a"), Download(demo="a")])
def test_a_download_of_nothing_or_two_things_is_a_usage_error(command: Download) -> None:
    with pytest.raises(StartError) as caught:
        download(command, lambda event: None, token=None)
    assert caught.value.exit == Exit.USAGE
