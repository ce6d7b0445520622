"""`worker download` against a real hub program that misbehaves on demand."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from router.store.catalogue import find_snapshot
from tests.children import ROOT, TOKEN, Child, environment, python
from tests.processes.hubs import Hub
from tests.processes.routers import SECRET
from worker.protocol.events import Downloaded, Event, Exit, Failed, Progress

WEIGHT_BYTES = 300_000


def torch_file(pickle: bytes) -> bytes:
    """An archive of torch.save with this pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pytorch_model/data.pkl", b"\x80\x02" + pickle)
        archive.writestr("pytorch_model/data/0", bytes(8))
    return content.getvalue()


# {"w": a tensor of two float32}
PICKLED = torch_file(
    b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    b"K\x00K\x02\x85K\x01\x85\x89}tRs."
)


def safetensors(size: int, seed: int = 0) -> bytes:
    """A whole file of exactly `size` bytes, different for each seed."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    for _ in range(3):  # the header names the size of the data, whose size depends on the header's
        data = size - 8 - len(header)
        header = json.dumps({"w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
    return len(header).to_bytes(8, "little") + header + hashlib.shake_128(bytes([seed])).digest(size - 8 - len(header))


MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" + b" " * 2000,
    "model.safetensors": safetensors(WEIGHT_BYTES),
    "README.md": b"# not needed",
    "pytorch_model.bin": b"a pickle",
}
NEEDED = sorted(path for path in MODEL if path not in ("README.md", "pytorch_model.bin"))


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """The hub of all tests, without faults."""
    hub.fails()
    return hub


def publish(hub: Hub, name: str, **content: bytes) -> str:
    """Make `files/name`, as a minimal model with one weights file; `content` adds or replaces files."""
    folder = hub.root / "files" / name
    folder.mkdir(parents=True)
    for path, data in {**MODEL, **content}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return f"files/{name}"


def download(hub: Hub, cache: Path, repo: str, *options: str, **env: str) -> Child:
    argv = python("-m", "worker", "download", f"--repo={repo}", f"--cache={cache}", *options)
    return Child(argv, env=environment(**{"HF_ENDPOINT": hub.address, **env}))


def succeed(hub: Hub, cache: Path, repo: str, *options: str, **env: str) -> tuple[Path, list[Event]]:
    with download(hub, cache, repo, *options, **env) as child:
        events = child.events()
        assert child.exit() == Exit.OK, child.log
    last = events[-1]
    assert isinstance(last, Downloaded)
    return Path(last.snapshot), events


def refused(hub: Hub, cache: Path, repo: str, exit: Exit, *options: str, **env: str) -> str:
    """The last line of the log of a download that ends with this exit code."""
    with download(hub, cache, repo, *options, **env) as child:
        assert not any(isinstance(event, Downloaded) for event in child.events())
        assert child.exit() == exit, child.log
        assert "Traceback" not in child.log
        return child.log.strip().splitlines()[-1]


def wait_for(child: Child, done: int) -> None:
    """Return once so many bytes have been fetched."""
    while child.event(Progress).done < done:
        pass


def partials(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.incomplete"))


def test_a_model_is_fetched_verified_and_named(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "plain")
    snapshot, events = succeed(hub, tmp_path, repo)
    assert sorted(path.name for path in snapshot.iterdir()) == NEEDED
    assert all((snapshot / name).read_bytes() == MODEL[name] for name in NEEDED)
    assert snapshot == tmp_path / "models--files--plain" / "snapshots" / snapshot.name
    assert (tmp_path / "models--files--plain" / "refs" / "main").read_text() == snapshot.name
    total = sum(len(MODEL[name]) for name in NEEDED)
    progress = [event for event in events if isinstance(event, Progress)]
    assert (progress[-1].done, progress[-1].total) == (total, total)
    assert {url.rpartition("/")[2]: part for url, part in progress[-1].files.items()} == {
        name.rpartition("/")[2]: [len(MODEL[name])] * 2 for name in NEEDED
    }
    assert all(event.total == total for event in progress)
    assert [event.done for event in progress] == sorted(event.done for event in progress)


def test_weights_with_the_name_that_autogptq_gave_them_are_fetched(hub: Hub, tmp_path: Path) -> None:
    weights = "gptq_model-4bit-128g.safetensors"
    repo = publish(hub, "gptq", **{weights: MODEL["model.safetensors"], "quantize_config.json": b'{"bits": 4}'})
    (hub.root / "files" / "gptq" / "model.safetensors").unlink()
    snapshot, _ = succeed(hub, tmp_path, repo)
    names = sorted(path.name for path in snapshot.iterdir())
    assert names == ["config.json", weights, "quantize_config.json", "tokenizer.json"]
    assert succeed(hub, tmp_path, repo, HF_HUB_OFFLINE="1")[0] == snapshot


def test_only_the_two_files_of_an_adapter_are_fetched(hub: Hub, tmp_path: Path) -> None:
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": safetensors(5000, seed=7)}
    repo = publish(hub, "adapter", **files)
    snapshot, _ = succeed(hub, tmp_path, repo, "--adapter")
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == files
    before = hub.journal(repo)
    assert succeed(hub, tmp_path, repo, "--adapter")[0] == snapshot
    assert hub.journal(repo) == before, "a complete adapter is not requested again"
    assert find_snapshot(repo, "main", str(tmp_path), adapter=True) == str(snapshot)
    assert find_snapshot(repo, "main", str(tmp_path)) is None, "it is no model"
    message = refused(hub, tmp_path, publish(hub, "no-adapter"), Exit.UNUSABLE, "--adapter")
    assert "has no adapter_config.json" in message


def test_a_complete_snapshot_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "cached")
    snapshot, _ = succeed(hub, tmp_path, repo)
    before = hub.journal(repo)
    assert succeed(hub, tmp_path, repo) == (snapshot, [Downloaded(snapshot=str(snapshot))])
    assert succeed(hub, tmp_path, repo, f"--revision={snapshot.name}")[0] == snapshot
    assert succeed(hub, tmp_path, repo, HF_HUB_OFFLINE="1")[0] == snapshot
    assert hub.journal(repo) == before


def test_the_hub_library_finds_our_snapshots_and_we_find_its(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "shared")
    code = (
        "import sys; from huggingface_hub import snapshot_download\n"
        "print(snapshot_download(sys.argv[1], cache_dir=sys.argv[2], local_files_only=sys.argv[3] == 'local'))"
    )
    env = environment(HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")

    def library(cache: Path, mode: str) -> Path:
        argv = python("-c", code, repo, str(cache), mode)
        return Path(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip())

    ours, _ = succeed(hub, tmp_path / "ours", repo)
    assert library(tmp_path / "ours", "local") == ours
    theirs = library(tmp_path / "theirs", "online")
    before = hub.journal(repo)
    assert succeed(hub, tmp_path / "theirs", repo)[0] == theirs
    assert hub.journal(repo) == before


def test_shards_are_those_of_the_index(hub: Hub, tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    repo = publish(
        hub,
        "sharded",
        **{name: safetensors(WEIGHT_BYTES, seed) for seed, name in enumerate(names)},
        **{"model.safetensors.index.json": json.dumps(index).encode(), "stray.safetensors": b"x"},
    )
    (hub.root / repo / "model.safetensors").unlink()
    snapshot, events = succeed(hub, tmp_path, repo)
    assert sorted(path.name for path in snapshot.glob("*.safetensors")) == names
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total > 2 * WEIGHT_BYTES
    (hub.root / repo / names[1]).unlink()
    assert names[1] in refused(hub, tmp_path / "again", repo, Exit.UNUSABLE)


def test_a_broken_connection_is_resumed_at_its_last_byte(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "broken-line")
    hub.fails(**{f"{repo}/model.safetensors": [{"drop": 100_000}, {"drop": 200_000}]})
    succeed(hub, tmp_path, repo)
    asked = [line for line in hub.fetched(repo) if line.startswith("model.")]
    assert asked == [f"model.safetensors{part}" for part in ("", " bytes=100000-", " bytes=200000-")]


def test_a_killed_download_is_resumed_at_its_last_byte(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "killed")
    hub.fails(**{f"{repo}/model.safetensors": {"stall": 100_000}})
    with download(hub, tmp_path, repo) as child:
        wait_for(child, 100_000)
    assert [path.stat().st_size for path in partials(tmp_path)] == [100_000]
    hub.fails()
    succeed(hub, tmp_path, repo)
    asked = [line for line in hub.fetched(repo) if line.startswith("model.")]
    assert asked == ["model.safetensors", "model.safetensors bytes=100000-"]
    assert hub.fetched(repo).count("tokenizer.json") == 1, "a complete file is not fetched twice"
    assert partials(tmp_path) == []


@pytest.mark.slow
def test_a_download_whose_files_are_deleted_ends_at_once_and_starts_again(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "deleted")
    hub.fails(**{f"{repo}/model.safetensors": {"stall": 100_000}})
    with download(hub, tmp_path, repo) as child:
        wait_for(child, 100_000)
        shutil.rmtree(tmp_path / "models--files--deleted")
        hub.fails(**{f"{repo}/model.safetensors": {"stall": 200_000}})
        assert child.exit() == Exit.DAMAGED  # at the first byte after the first stall
        assert f"files below {tmp_path} were deleted during the download; try again" in child.log
        assert "Traceback" not in child.log
    hub.fails()
    succeed(hub, tmp_path, repo)
    asked = [line for line in hub.fetched(repo) if line.startswith("model.")]
    assert asked == ["model.safetensors", "model.safetensors bytes=100000-", "model.safetensors"]


def test_a_server_that_ignores_ranges_sends_the_file_again(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "no-ranges")
    hub.fails(**{f"{repo}/model.safetensors": [{"drop": 100_000}, {"ranges": False}]})
    snapshot, _ = succeed(hub, tmp_path, repo)
    assert (snapshot / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize(
    ("place", "fault", "exit", "words"),
    [
        ("", {"status": 401, "code": "RepoNotFound"}, Exit.UNUSABLE, "HF_TOKEN"),
        ("", {"status": 403, "code": "GatedRepo"}, Exit.UNUSABLE, "is gated: accept its terms at http"),
        ("", {"status": 403}, Exit.UNUSABLE, "answers 403"),
        ("", {"status": 404, "code": "RepoNotFound"}, Exit.UNUSABLE, "is not on http"),
        ("", {"status": 429}, Exit.NETWORK, "answers 429"),
        ("/tokenizer.json", {"status": 403, "code": "GatedRepo"}, Exit.UNUSABLE, "is gated: accept its terms at http"),
        ("/model.safetensors", {"status": 503}, Exit.NETWORK, "answers 503"),
        ("/model.safetensors", {"status": 404}, Exit.UNUSABLE, "lists model.safetensors, but answers 404 for it"),
    ],
)
def test_a_refusing_hub_differs_from_a_failing_one(
    hub: Hub, tmp_path: Path, place: str, fault: dict[str, Any], exit: Exit, words: str
) -> None:
    repo = publish(hub, f"refused.{fault['status']}{fault.get('code', '')}{len(place)}")
    hub.fails(**{repo + place: fault})
    message = refused(hub, tmp_path, repo, exit)
    assert words in message
    assert repo in message


def test_names_that_do_not_exist_are_unusable(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "known")
    refused(hub, tmp_path, "org/unknown", Exit.UNUSABLE)
    refused(hub, tmp_path, "not/a/name", Exit.UNUSABLE)
    message = refused(hub, tmp_path, repo, Exit.UNUSABLE, "--revision=v9")
    assert message == f"worker: {repo} has no revision 'v9'"


def test_a_hub_that_cannot_be_reached_is_a_network_failure(hub: Hub, tmp_path: Path) -> None:
    message = refused(hub, tmp_path, "org/any", Exit.NETWORK, HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in message


def test_an_offline_download_sends_no_request(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "offline")
    assert "HF_HUB_OFFLINE" in refused(hub, tmp_path, repo, Exit.UNUSABLE, HF_HUB_OFFLINE="1")
    assert hub.journal(repo) == []


@pytest.mark.slow
def test_a_stalled_hub_is_a_network_failure_and_keeps_the_partial_file(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "stalled")
    hub.fails(**{f"{repo}/model.safetensors": {"stall": 1000}})
    assert "timed out" in refused(hub, tmp_path, repo, Exit.NETWORK, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert [path.stat().st_size for path in partials(tmp_path)] == [1000]


@pytest.mark.parametrize(
    ("file", "fault"),
    [("model.safetensors", {"flip": 200_000}), ("model.safetensors", {"short": 200_000}), ("config.json", {"flip": 3})],
    ids=["wrong bytes", "too few bytes", "a small file"],
)
def test_damaged_content_is_removed_and_fetched_again(
    hub: Hub, tmp_path: Path, file: str, fault: dict[str, int]
) -> None:
    repo = publish(hub, f"damaged-{file}-{next(iter(fault))}")
    hub.fails(**{f"{repo}/{file}": fault})
    assert file in refused(hub, tmp_path, repo, Exit.DAMAGED)
    content = MODEL[file]
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    names = {git, hashlib.sha256(content).hexdigest()}
    # Another file may be unfinished when the program exits. It is continued.
    assert names.isdisjoint(path.name.split(".")[0] for path in partials(tmp_path))
    hub.fails()
    snapshot, _ = succeed(hub, tmp_path, repo)
    assert (snapshot / file).read_bytes() == content
    assert partials(tmp_path) == []


def test_weights_that_contradict_their_header_are_damaged(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "bad-header", **{"model.safetensors": MODEL["model.safetensors"][:-7]})
    message = refused(hub, tmp_path, repo, Exit.DAMAGED)
    assert f"has {WEIGHT_BYTES - 7} bytes, but its header requires {WEIGHT_BYTES}" in message
    assert [path.name for path in tmp_path.rglob("model.safetensors")] == []


def test_a_download_that_does_not_fit_the_disk_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "huge")
    hub.fails(**{f"{repo}/model.safetensors": {"size": 10**15}})
    message = refused(hub, tmp_path, repo, Exit.DISK_FULL)
    assert f"needs {10**15 // 2**20} MiB more below {tmp_path}" in message
    assert "MiB are free" in message


@pytest.mark.slow
def test_a_download_that_fills_the_disk_removes_its_partial_files(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "filling")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        hub.fails(**{f"{repo}/model.safetensors": {"stall": 100_000}})
        with download(hub, disk, repo) as child:
            wait_for(child, 100_000)
            with contextlib.suppress(OSError):
                (disk / "filler").write_bytes(bytes(1 << 20))
            hub.fails()
            assert child.exit() == Exit.DISK_FULL
            assert f"no room left below {disk}" in child.log
        assert partials(disk) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_token_is_sent_to_the_hub_only(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "private")
    with Child(python(str(ROOT / "tests" / "fake_hub.py"), str(hub.root))) as program:
        elsewhere = Hub(hub.root, program.line() or "")
        hub.fails(**{repo: {"token": SECRET}, f"{repo}/model.safetensors": {"redirect": elsewhere.address}})
        refused(hub, tmp_path, repo, Exit.UNUSABLE)
        with download(hub, tmp_path, repo, HF_TOKEN=SECRET) as child:
            events = child.events()
            assert child.exit() == Exit.OK, child.log
            assert SECRET not in child.log + repr(events)
        assert any(line.endswith(" token") for line in hub.journal(repo))
        assert elsewhere.fetched(repo) == ["model.safetensors"], "without the token"


@pytest.mark.slow
def test_two_downloads_of_one_model_fetch_each_file_once(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "twice")
    hub.fails(**{f"{repo}/model.safetensors": {"stall": 100_000}})
    with download(hub, tmp_path, repo) as first, download(hub, tmp_path, repo) as second:
        for child in (first, second):
            wait_for(child, 100_000)
        hub.fails()
        assert first.event(Downloaded) == second.event(Downloaded)
        assert first.exit() == second.exit() == Exit.OK
    asked = [line for line in hub.fetched(repo) if line.startswith("model.")]
    assert asked == ["model.safetensors", "model.safetensors bytes=100000-"]


def test_a_pickle_that_could_run_code_is_refused_by_a_download_and_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "unsafe", **{"pytorch_model.bin": torch_file(b"cos\nsystem\nX\x04\x00\x00\x00exit\x85R.")})
    (hub.root / repo / "model.safetensors").unlink()
    for _ in range(2):
        assert "pytorch_model.bin needs os.system, which could run code" in refused(hub, tmp_path, repo, Exit.UNUSABLE)
    assert hub.fetched(repo).count("pytorch_model.bin") == 1


def test_a_pickle_that_is_cut_short_is_damaged_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "short", **{"pytorch_model.bin": PICKLED[:-9]})
    (hub.root / repo / "model.safetensors").unlink()
    assert "is no complete file of torch.save" in refused(hub, tmp_path, repo, Exit.DAMAGED)
    (hub.root / repo / "pytorch_model.bin").write_bytes(PICKLED)
    succeed(hub, tmp_path, repo)


def test_a_supervised_download_reports_its_failure_and_dies_with_its_router(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "supervised")
    argv = python("-m", "worker", "download", f"--repo={repo}", f"--cache={tmp_path}", "--supervised")
    env = environment(HF_ENDPOINT=hub.address)
    hub.fails(**{repo: {"status": 503}})
    with Child([*argv, f"--parent-pid={os.getpid()}"], env=env, stdin=f"{TOKEN}\n".encode()) as child:
        assert "answers 503" in child.event(Failed).message
        assert child.exit() == Exit.NETWORK
    hub.fails(**{f"{repo}/model.safetensors": {"stall": 100_000}})
    with Child([*argv, f"--parent-pid={os.getpid()}"], env=env, stdin=f"{TOKEN}\n".encode()) as child:
        wait_for(child, 100_000)
        child.close_stdin()
        assert child.exit() == Exit.ORPHANED


def test_a_download_never_imports_torch(hub: Hub, tmp_path: Path) -> None:
    repo = publish(hub, "light")
    code = (
        "import sys; from worker.program.main import run\n"
        "print(run(sys.argv[1:]), *{'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    argv = python("-c", code, "download", f"--repo={repo}", f"--cache={tmp_path}")
    with Child(argv, env=environment(HF_ENDPOINT=hub.address)) as child:
        child.event(Downloaded)
        assert child.exit() == 0
        assert child.log == "0\n"
