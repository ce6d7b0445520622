"""Forked workers are charged what they take, and the memory that they share is charged once.

Definitions, by the kernel's account (proc_pid_smaps(5)):

    private   what no other process has: Private_Dirty, mapped weights, and what the worker held more at its peak
    share     its part of the data that it has in common with the fork server and other workers: Pss_Anon less
              Private_Dirty
    later     what the worker reports that it may still allocate: a part of the shared data
    shared    the fork server's own account: all that it holds, and code of libraries that only workers use

A worker's reservation is within 5 % of private + share, less the share, which `shared` contains, and not below it. It
is so after its load, after requests, and after grammars. Mapped libraries are in `shared` only, but for that of
grammars, which the fork server does not have: it also counts for each worker.
"""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.estimate import estimate
from tests import lora, tiny, tiny_vision
from tests.processes.forking import parent
from tests.processes.routers import DEADLINE, Router, router
from tests.rankers import ranker
from worker.protocol.memory import FORK_SERVER_BYTES, LIBRARY_CODE_BYTES, MIB

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

TOLERANCE = 0.05
MODELS = {"a": "llama", "b": "qwen3", "c": "gpt2", "d": "llama"}  # the estimate of "d" is learned from "a"
CTX, ROWS, MARGIN = 256, 2, 16
# A shared page belongs to a worker once the fork server and all other workers have copied it.
COPIED_BY_OTHERS = 2 * MIB
LONG = 2048  # context and chunk of a model that takes too long to compute its largest steps in a load
LARGE = {"hidden_size": 320, "intermediate_size": 1280, "max_position_embeddings": LONG}
KEYS = (f"ctx-size = {CTX}", f"parallel = {ROWS}", "threads = 1")


def account(pid: int) -> dict[str, int]:
    """The kernel's sums over all areas of a process, in bytes."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        pytest.skip("workers forbid others to look at their pages")
    lines = rollup.splitlines()[1:] + Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in rows}


def presets(general: Sequence[str], models: Mapping[str, Sequence[str]]) -> str:
    """The text of a file of presets: keys of all models, and the keys of each."""
    return "\n".join(["[*]", *general, *(line for name, own in models.items() for line in (f"[{name}]", *own))]) + "\n"


def plain(folder: Path) -> str:
    return presets(KEYS, {name: [f"model = {tiny.make(family, folder / name)}"] for name, family in MODELS.items()})


def forking(folder: Path, text: str, *options: str) -> AbstractAsyncContextManager[Router]:
    """A router with a fork server and these presets."""
    file = folder / "models.ini"
    file.write_text(text)
    return router("--models-preset", str(file), "--fork-server", *options)


async def ask(up: Router, name: str, **fields: Any) -> int:
    body = {"model": name, "prompt": "hi", "max_tokens": 4, **fields}
    return (await up.client.post("/v1/completions", json=body)).status_code


async def fill(up: Router, name: str) -> None:
    """Send a full batch at full context."""
    full = {"prompt": [5 + at % 300 for at in range(CTX - 16)], "max_tokens": 16, "ignore_eos": True, "top_p": 0.9}
    assert set(await asyncio.gather(*(ask(up, name, **full, seed=seed) for seed in range(2 * ROWS)))) == {200}


@asynccontextmanager
async def never_exceeding(up: Router, fork_server: int) -> AsyncIterator[None]:
    """Compare the reservations with the kernel's account many times a second, of each worker and of all together.

    A worker may hold COPIED_BY_OTHERS more than its reservation until its next pulse, but all together may not. A
    reservation that changes meanwhile counts with its larger value. The router is asked twice: a pulse that was sent
    before the account was read may arrive together with the first question, which is then answered first.
    """

    async def books() -> tuple[dict[int, int], int]:
        state: Any = (await up.client.get("/router/state")).json()
        reserved = {row["pid"]: row["reserved"]["cpu"] for row in state["workers"]}
        return reserved, sum(reserved.values()) + state["devices"][0]["shared"]

    async def compare() -> None:
        (reserved, all_of_them), is_over = await books(), False
        while not is_over:
            is_over = over.is_set()  # compare once more
            held = {pid: account(pid) for pid in (fork_server, *reserved)}
            before, all_before = reserved, all_of_them
            await books()
            reserved, all_of_them = await books()
            for pid in reserved:
                most = max(before[pid], reserved[pid]) + COPIED_BY_OTHERS
                assert held[pid]["Private_Dirty"] <= most, held[pid]
            assert sum(each["Pss"] for each in held.values()) <= max(all_before, all_of_them)
            await asyncio.sleep(0.05)  # a sampler has nothing to wait for

    over = asyncio.Event()
    comparison = asyncio.create_task(compare())
    try:
        yield
    finally:
        over.set()
        await comparison


def own_files(pid: int) -> int:
    """Resident bytes of weights and of the library for grammars in a process, which it has not written to."""
    found, is_own = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_own = "llguidance" in line or line.endswith(".safetensors")
        elif is_own and first in ("Private_Clean:", "Shared_Clean:", "Shared_Dirty:"):
            found += int(rest[0]) * 1024
    return found


def difference(pid: int, charged: int) -> tuple[int, int]:
    """Bytes by which a reservation exceeds the private memory, and by which it may."""
    held = account(pid)
    freed = max(0, held["VmHWM"] - held["VmRSS"])
    private = held["Private_Dirty"] + own_files(pid) + freed
    return charged - private, int(TOLERANCE * (private + held["Pss_Anon"] - held["Private_Dirty"]))


async def is_charged_what_it_takes(up: Router, name: str) -> None:
    """Compare the reservation with the private memory, at its peak, once a pulse has reported it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            state: Any = (await up.client.get("/router/state")).json()
            [row] = (row for row in state["workers"] if row["model"] == name)
            excess, most = difference(row["pid"], row["reserved"]["cpu"])
            if 0 <= excess <= most:
                return


@asynccontextmanager
async def loaded(up: Router, name: str) -> AsyncIterator[None]:
    """Load a model, compare the reservations in the block, and unload it."""
    assert (await up.client.post("/models/load", json={"model": name})).status_code == 200
    await up.becomes(name, "loaded")
    await is_charged_what_it_takes(up, name)
    async with never_exceeding(up, parent((await up.workers())[name])):
        yield
        await is_charged_what_it_takes(up, name)
    assert (await up.client.post("/models/unload", json={"model": name})).status_code == 200
    await up.has_no_workers()


async def fork_server_of(up: Router) -> int:
    found = re.search(r"process (\d+)", await up.says("the fork server .* is warm"))
    assert found
    return int(found[1])


async def test_forked_workers_are_charged_what_they_take_from_their_first_load_on(real: Router, tmp_path: Path) -> None:
    await real.serve_presets(plain(tmp_path))
    for count, name in enumerate(MODELS, 1):
        if name != "d":  # another test may have loaded the same model
            assert (await real.client.post("/router/forget", json={"model": name})).status_code == 200
        assert (await real.client.post("/models/load", json={"model": name})).status_code == 200
        await real.becomes(name, "loaded")
        state: Any = (await real.client.get("/router/state")).json()
        [host], rows = state["devices"], {row["model"]: row for row in state["workers"]}
        assert len(rows) == count
        excess, most = difference(rows[name]["pid"], rows[name]["reserved"]["cpu"])
        assert excess <= most, "when it is ready"
        fork_server = parent(rows[name]["pid"])
        async with never_exceeding(real, fork_server):
            assert await ask(real, name) == 200
            await is_charged_what_it_takes(real, name)
            await fill(real, name)
        await is_charged_what_it_takes(real, name)
        truth = sum(account(pid)["Pss"] for pid in (fork_server, *(row["pid"] for row in rows.values())))
        assert truth <= sum(row["reserved"]["cpu"] for row in rows.values()) + host["shared"]
        assert host["shared"] <= account(fork_server)["Rss"] + LIBRARY_CODE_BYTES


def others(folder: Path) -> str:
    """An embedder, a cross-encoder, and a generator that takes too long to compute its largest steps in a load."""
    ranker(folder / "scorer", "bert")
    tiny.make("bert-embed", folder / "embedder")
    tiny.make("llama", folder / "large", **LARGE)
    models = {
        "embedder": [f"model = {folder}/embedder"],
        "scorer": [f"model = {folder}/scorer", "reranking = on"],
        "large": [f"model = {folder}/large", f"ctx-size = {LONG}", f"prefill-chunk = {LONG}"],
    }
    return presets(["parallel = 2", "threads = 1"], models)


async def ask_others(up: Router, name: str) -> None:
    """Send requests with small and with large steps, and one with a large answer."""
    if name == "large":
        for length in (1, 3, 40, LONG - 8):
            fields = {"prompt": [5 + at % 300 for at in range(length)], "top_p": 0.9, "logprobs": length % 2}
            assert await ask(up, name, **fields) == 200
        return
    for count, words in ((1, 1), (7, 20), (2, 60), (600, 2)):
        texts = ["word " * words] * count
        body = {"input": texts} if name == "embedder" else {"query": "word", "documents": texts}
        path = "/v1/embeddings" if name == "embedder" else "/v1/rerank"
        assert (await up.client.post(path, json={"model": name, **body})).status_code == 200


async def test_embedders_and_models_whose_steps_are_estimated_are_charged_what_they_take(tmp_path: Path) -> None:
    async with forking(tmp_path, others(tmp_path)) as up:
        fork_server = await fork_server_of(up)
        for name in ("embedder", "scorer", "large", "large"):  # the last one is prebuilt
            assert (await up.client.post("/models/load", json={"model": name})).status_code == 200
            await up.becomes(name, "loaded")
            await is_charged_what_it_takes(up, name)  # its KV cache is mapped in the background
            async with never_exceeding(up, fork_server):
                await ask_others(up, name)
                await is_charged_what_it_takes(up, name)
            assert (await up.client.post("/models/unload", json={"model": name})).status_code == 200
            await up.has_no_workers()


def with_additions(folder: Path) -> str:
    """A model with prompt lookup, one with a draft model, and one with adapters."""
    large = tiny.make("llama", folder / "large", **LARGE)
    tiny.make("llama", folder / "draft", seed=1, **LARGE)
    for seed in range(3):
        lora.make(large, folder / "adapters" / f"adapter{seed}", seed=seed, r=4 << seed)
    own = {
        "lookup": "spec-type = ngram-mod",
        "drafting": f"model-draft = {folder}/draft",
        "adapters": "enable-lora = on\nmax-loras = 2",
    }
    general = ["parallel = 2", "threads = 1", f"ctx-size = {LONG}", f"prefill-chunk = {LONG}"]
    return presets(general, {name: [f"model = {large}", key] for name, key in own.items()})


async def ask_with_additions(up: Router, name: str, folder: Path) -> None:
    """Send requests alone and together, whose text repeats itself so that something is drafted, with each adapter."""
    models = [name]
    if name == "adapters":
        sources = [{"src": str(each), "name": each.name} for each in sorted((folder / "adapters").iterdir())]
        for source in sources:
            answer = await up.client.post(f"/models/{name}/adapters", params=source)
            assert answer.status_code == 200, answer.text
        models += [f"{name}@{source['name']}" for source in sources]
    for length in (1, 3, 40, LONG - 24):
        fields = {"prompt": [5 + at % 7 for at in range(length)], "max_tokens": 16, "ignore_eos": True}
        for model in models:
            assert await ask(up, model, **fields, temperature=0) == 200
        together = models if len(models) > 1 else [name] * 2
        asked = (ask(up, model, **fields, top_p=0.9, logprobs=1, seed=seed) for seed, model in enumerate(together))
        assert set(await asyncio.gather(*asked)) == {200}
    for model in models[1:]:
        answer = await up.client.delete(f"/models/{name}/adapters/{model.partition('@')[2]}")
        assert answer.status_code == 200, answer.text


def in_bfloat16(folder: Path) -> str:
    families = {"small": ("llama", {}), "large": ("llama", LARGE), "embedder": ("bert-embed", {})}
    models = {}
    for name, (family, own) in families.items():
        models[name] = [f"model = {tiny.make(family, folder / name, dtype=torch.bfloat16, **own)}"]
    models["drafting"] = [f"model = {folder}/small", f"model-draft = {folder}/large"]
    return presets(["parallel = 6", "threads = 1", f"prefill-chunk = {LONG}", "dtype = bfloat16"], models)


async def ask_at_once(up: Router, name: str, *lengths: int, max_tokens: int) -> None:
    prompts = ([5 + at % 300 for at in range(length)] for length in lengths)
    asked = (ask(up, name, prompt=prompt, max_tokens=max_tokens, ignore_eos=True) for prompt in prompts)
    assert set(await asyncio.gather(*asked)) == {200}


async def test_models_in_bfloat16_are_charged_what_they_take(real: Router, tmp_path: Path) -> None:
    await real.serve_presets(in_bfloat16(tmp_path))
    for name in ("embedder", "small", "large", "drafting"):
        async with loaded(real, name):
            if name == "embedder":
                await ask_others(real, name)
            else:
                await ask_at_once(real, name, *[120] * 6, max_tokens=100)
                for first in (1, 3, 5):  # attention needs code for each length, and 75 are more than are kept
                    await ask_at_once(real, name, *range(first, 150, 6), max_tokens=1)
                await ask_at_once(real, name, 1, 3, max_tokens=40)


async def test_larger_models_with_experts_are_charged_what_they_take(real: Router, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": LONG}
    snapshot = tiny.make("mixtral", tmp_path / "experts", **sizes)
    keys = ["parallel = 2", "threads = 1", f"ctx-size = {LONG}", f"prefill-chunk = {LONG}"]
    await real.serve_presets(presets(keys, {"experts": [f"model = {snapshot}"]}))
    for _ in range(2):
        async with loaded(real, "experts"):
            for length in (1, 40, LONG - 8, 40, LONG - 8):
                assert await ask(real, "experts", prompt=[5 + at * at % 300 for at in range(length)]) == 200
            same = {"prompt": [7] * (LONG - 8), "top_p": 0.9}  # all tokens have the same experts
            assert set(await asyncio.gather(*(ask(real, "experts", **same, seed=seed) for seed in range(4)))) == {200}


async def test_models_with_drafts_or_adapters_are_charged_what_they_take(real: Router, tmp_path: Path) -> None:
    await real.serve_presets(with_additions(tmp_path))
    for name in ("lookup", "drafting", "adapters", "adapters"):  # the second time what it takes is learned
        async with loaded(real, name):
            await ask_with_additions(real, name, tmp_path)


@functools.cache
def picture(size: tuple[int, int]) -> str:
    return tiny_vision.data_url(PIL.Image.new("RGB", size, "teal"))


async def show(up: Router, name: str, *sizes: tuple[int, int]) -> int:
    """Send one request with images of these sizes."""
    parts = [{"type": "image_url", "image_url": {"url": picture(size)}} for size in sizes]
    body = {"model": name, "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
    return (await up.client.post("/v1/chat/completions", json=body)).status_code


async def test_models_with_images_are_charged_what_they_take(real: Router, tmp_path: Path) -> None:
    models = {name: [f"model = {tiny_vision.make(name, tmp_path / name)}"] for name in ("llava", "idefics3")}
    await real.serve_presets(presets([*KEYS, "limit-images = 2"], models))
    for name in ("idefics3", "llava", "llava"):  # the second time what it takes is learned
        async with loaded(real, name):
            await fill(real, name)
            await is_charged_what_it_takes(real, name)
            for side in (40, 4096):
                assert await show(real, name, (side, side)) == 200
                several = (show(real, name, (side, side), (side // 2, side)) for _ in range(3))
                assert set(await asyncio.gather(*several)) == {200}
                await fill(real, name)
                await is_charged_what_it_takes(real, name)


async def test_requests_and_grammars_are_charged_before_they_take_memory(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}}
    async with forking(tmp_path, plain(tmp_path)) as up:
        fork_server = await fork_server_of(up)
        for name in ("a", "b"):
            assert await ask(up, name) == 200
        async with never_exceeding(up, fork_server):
            for name in ("a", "b"):
                await fill(up, name)
                for seed in range(20):
                    assert await ask(up, name, seed=seed, top_p=0.5) == 200
                await is_charged_what_it_takes(up, name)
                for number in range(16):
                    assert await ask(up, name, guided_json={**schema, "title": str(number)}) == 200
                await is_charged_what_it_takes(up, name)
            for count in (*range(60, 72), 200):
                # 20 MiB each, and 40 while it is compiled; 68 for the last one, which the step loop rejects.
                status = await ask(up, "b", guided_regex=f"(a{{1000}}){{{count}}}")
                assert status == (200 if count < 200 else 400)
            many = {f"p{number}": {"type": "string"} for number in range(7000)}
            schema_of_many = {"type": "object", "properties": many, "required": list(many)}
            assert await ask(up, "b", guided_json=schema_of_many) == 200
            for name in ("a", "b"):
                await is_charged_what_it_takes(up, name)


async def test_the_first_worker_and_the_fork_server_stay_within_a_tight_limit(tmp_path: Path) -> None:
    preset = Preset(id="a", ctx_size=CTX, parallel=ROWS, threads=1)
    text = plain(tmp_path)
    least = estimate(checkpoint.read(tmp_path / "a"), preset, on_host=True, forked=True)
    within = -(-(least.granted(least.kv_steps).total + FORK_SERVER_BYTES + LIBRARY_CODE_BYTES) // MIB)
    async with forking(tmp_path, text, *limited(within)) as up:
        fork_server = await fork_server_of(up)
        assert await ask(up, "a") == 200
        state: Any = (await up.client.get("/router/state")).json()
        [worker], [host] = state["workers"], state["devices"]
        claim = re.search(r"(\d+)MiB@cpu", await up.says("starting reserved"))
        assert claim
        assert int(claim[1]) * MIB + host["shared"] <= within * MIB, "also while it loaded"
        most = account(fork_server)["Rss"] + account(worker["pid"])["Private_Dirty"]
        assert most <= worker["reserved"]["cpu"] + host["shared"] <= within * MIB


async def test_a_worker_is_refused_if_the_fork_server_leaves_too_little_of_a_limit(tmp_path: Path) -> None:
    beside = 10  # less than any worker takes, which alone would fit; a fork server may take less than is assumed
    limit = limited((FORK_SERVER_BYTES + LIBRARY_CODE_BYTES) // MIB + beside)
    async with forking(tmp_path, plain(tmp_path), *limit) as up:
        await fork_server_of(up)  # it forks the exact estimate
        answer = await up.client.post("/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 4})
        assert answer.status_code == 507
        assert re.search(r"fork server [34]\d\d MiB", answer.text)


def limited(mib: int) -> tuple[str, ...]:
    """Options for so much main memory."""
    return ("--device-limit", f"cpu={mib + MARGIN}", "--models-memory-margin", str(MARGIN))
