"""`router estimate`: with no server, from a folder, the cache, or a hub of which only headers are read."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from router.cli import hub_headers
from router.cli.estimate import Machine
from router.cli.hub_headers import RemoteError
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.memory import checkpoint, learned
from router.memory.estimate import RUNTIME_HOST, SERVING_HOST, Overhead
from router.memory.learned import LearnedEstimates
from router.memory.sharding import Choice
from router.planner.ledger import HOST, LOCAL, DeviceId
from router.store.catalogue import find_preset
from router.store.snapshots import Snapshots
from tests import tiny
from tests.children import Child
from tests.processes.hubs import Hub
from tests.router.cli.commands import Estimate, Run, write
from tests.sparse import write_weights
from worker.protocol.memory import FORK_SERVER_BYTES, LIBRARY_CODE_BYTES
from worker.protocol.snapshot_files import MANIFEST, ConversionManifest, encode_manifest

MIB = 1 << 20
SHARED = (FORK_SERVER_BYTES + LIBRARY_CODE_BYTES) // MIB  # of a limit in MiB, for the fork server
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    with Child([sys.executable, str(ROOT / "tests" / "fake_hub.py"), str(root)]) as child:
        address = child.line()
        assert address is not None
        yield Hub(root, address)


def test_the_segments_of_a_folder_sum_to_the_total(tmp_path: Path, estimate: Estimate) -> None:
    code, said = estimate(str(write(tmp_path / "m")), "--ctx-size", "256", "--parallel", "2")
    assert (code, said["schema"], said["source"], said["fits"], said["downloaded"]) == (0, 1, "static", True, True)
    assert said["weights"] >= (300 * 100 + 512 * 64) * 2
    token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, elements, bytes
    assert said["context"] == token * 256, "of one request"
    most = {"tokens": 512, "bytes": token * 512}
    assert said["kv_cache"] == {"least": {"tokens": 256, "bytes": token * 256}, "granted": most, "most": most}
    parts = sum(said[segment] for segment in ("weights", "context", "compute", "runtime", "host"))
    assert parts == said["total"]
    [room] = said["devices"]
    assert (room["device"], room["needs"], room["fits"]) == ("cpu", said["total"], True)


def test_a_quantized_kv_cache_is_estimated_and_explained(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    words = [str(write(tmp_path / "m")), "--ctx-size", "256", "--parallel", "2", "-ctk", "q8_0", "-ctv", "q8_0"]
    _, said = estimate(*words)
    assert (said["kv_cache_dtype"], said["dtype"]) == ("int8", "bfloat16")
    assert said["context"] == 2 * 2 * 2 * (16 + 2) * 256, "layers, keys and values, heads, a head's bytes, tokens"
    assert "2 layers x 2 KV heads x 36 B of int8 x 256 tokens, for one request" in run("estimate", *words, code=0).out


def test_less_than_the_most_kv_cache_is_granted_where_less_is_free(
    tmp_path: Path, estimate: Estimate, run: Run
) -> None:
    words = [str(write(tmp_path / "m")), "--models-memory-margin", "0", "--parallel", "64"]
    base = estimate(*words)[1]
    least, step = base["kv_cache"]["least"]["bytes"], 16 * 2 * 2 * 2 * 16 * 2
    limit = (base["total"] >> 20) + 5 + SHARED
    code, said = estimate(*words, "--device-limit", f"cpu={limit}")
    room = (limit - SHARED << 20) - base["total"]
    assert (code, said["total"]) == (0, base["total"])
    assert said["kv_cache"]["granted"]["bytes"] == least + room // step * step
    assert said["kv_cache"]["least"] == base["kv_cache"]["least"]
    assert said["kv_cache"]["most"] == base["kv_cache"]["granted"] == base["kv_cache"]["most"]
    lines = run("estimate", *words, "--device-limit", f"cpu={limit}", code=0).out
    assert f"KV cache of {said['kv_cache']['granted']['tokens']} tokens, if nothing else is loaded" in lines
    assert f"KV cache of {base['kv_cache']['most']['tokens']} tokens, the full context of 64 sequences" in lines


def test_kv_tokens_and_reserved_memory_are_in_the_figures_and_the_text(
    tmp_path: Path, estimate: Estimate, run: Run
) -> None:
    words = [str(write(tmp_path / "m")), "--ctx-size", "256", "--kv-tokens", "4096", "--reserved-memory", "300"]
    assert estimate(*words)[1]["context"] == 2 * 2 * 2 * 16 * 2 * 4096
    said = run("estimate", *words, code=0).out
    assert "2 KV heads x 64 B of bfloat16 x 4096 tokens" in said
    assert "and tables for grammars; reserved-memory, 300.0 MiB" in said


def test_the_estimate_is_of_the_converted_snapshot_if_loads_use_it(tmp_path: Path, estimate: Estimate) -> None:
    folder, state = write(tmp_path / "m"), tmp_path / "own"
    target = Snapshots(cache="", state=state, offline=True).conversions.target(str(folder))
    assert target is not None
    write(target, padding=100_000)
    facts = (target / "model.safetensors").stat()
    manifest = ConversionManifest(source=str(folder), files={"model.safetensors": [facts.st_size, facts.st_mtime_ns]})
    (target / MANIFEST).write_bytes(encode_manifest(manifest))
    found = [
        estimate(str(folder), "--ctx-size", "256", "--state-dir", str(state), *words)[1]["weights"]
        for words in ((), ("--no-prepare",))
    ]
    assert found[0] > found[1] + 90_000


def test_each_command_that_reads_presets_shows_the_warnings(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    monkeypatch.setenv("OPTION_FOO", "1")
    warning = "warning: OPTION_FOO: is not a variable of this router\n"
    for command in ("estimate", "prepare", "download"):
        assert warning in run(command, str(folder), "--state-dir", str(tmp_path / "state"), code=0).err, command
    assert warning in run("check", str(folder), code=0).out


def test_quantization_on_load_is_estimated_and_explained(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    folder = str(write(tmp_path / "m"))
    said = estimate(folder, "--quantization", "bnb-4bit")[1]
    assert (said["quantization"], said["unquantized"]) == ("bnb-4bit", 512 * 64 * 2)
    assert said["weights"] == said["quantized"] + said["unquantized"]
    told = run("estimate", folder, "--load-in-4bit", code=0).out
    assert "bnb-4bit, bfloat16" in told
    assert "quantized tensors with their scales take" in told
    assert "stay in bfloat16: embeddings, head, norms, routers and experts" in told
    assert "the checkpoint is not quantized" in run("estimate", folder, "--quantization", "awq", code=1).err


def test_an_estimate_from_the_weights_alone_is_called_a_guess(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    folder = write(tmp_path / "m")
    config = {"model_type": "alien", "architectures": ["AlienForCausalLM"], "depth": 3}
    (folder / "config.json").write_text(json.dumps(config))
    code, said = estimate(str(folder))
    assert (code, said["source"]) == (0, "weights")
    assert "weights x 2" in said["note"]
    told = run("estimate", str(folder), code=0).out
    assert "a guess from the weights alone" in told
    assert "config.json of alien does not state its layers" in told


def test_a_built_in_model_has_an_estimate(tmp_path: Path, estimate: Estimate) -> None:
    code, said = estimate("demo-chat", "--demo", "--state-dir", str(tmp_path))
    assert (code, said["source"], said["fits"], said["downloaded"]) == (0, "static", True, True)
    assert 1 << 20 < said["weights"] < 8 << 20
    assert not (tmp_path / "demo").exists(), "it is shipped"


def test_a_measured_process_overhead_is_used_and_called_measured(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    words = [str(write(tmp_path / "m")), "--no-fork-server", "--state-dir", str(tmp_path / "own")]
    assumed = estimate(*words)[1]
    LearnedEstimates(tmp_path / "own" / "estimates.json").record_overhead("cpu", Overhead(host=MIB), forked=False)
    measured = estimate(*words)[1]
    assert (assumed["runtime_source"], measured["runtime_source"]) == ("assumed", "measured")
    assert assumed["runtime"] - measured["runtime"] == RUNTIME_HOST - SERVING_HOST - MIB
    assert "libraries (measured on main memory)" in run("estimate", *words, code=0).out


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "is an adapter, which needs the model that it was made for"),
        ("model-q4.gguf", "has GGUF files: GGUF needs the llama-server engine"),
        ("readme.txt", "has no config.json"),
    ],
)
def test_the_message_for_a_folder_without_a_model_says_what_it_has(
    tmp_path: Path, run: Run, file: str, message: str
) -> None:
    (tmp_path / file).write_text("{}")
    assert message in run("estimate", str(tmp_path), code=2).err


def test_parts_without_their_index_are_named(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert "no index that names parts; fetch it again, or take a revision" in run("estimate", str(folder), code=1).err


def test_an_adapter_beside_a_config_is_named(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert (
        "has an adapter only (adapter_model.safetensors); serve its model" in run("estimate", str(folder), code=1).err
    )


def test_a_preset_is_estimated_with_its_keys(tmp_path: Path, estimate: Estimate) -> None:
    ini = tmp_path / "models.ini"
    ini.write_text(f"[small]\nmodel = {write(tmp_path / 'one')}\nctx-size = 128\nalias = tiny\n")
    code, said = estimate("tiny", "--models-preset", str(ini), "--models-memory-margin", "0")
    assert (code, said["model"], said["ctx_size"]) == (0, "small", 128)


@pytest.mark.parametrize("words", [["--device-limit", "cpu=50%"], ["--gpu-memory-utilization", "0.5"]])
def test_a_share_of_a_device_limits_the_model(tmp_path: Path, estimate: Estimate, words: list[str]) -> None:
    words = [str(write(tmp_path / "m")), "--models-memory-margin", "0", "--no-fork-server", *words]
    code, said = estimate(*words)
    [device] = said["devices"]
    assert (code, device["usable_when_empty"]) == (0, device["total"] // 2)


def test_the_message_for_a_model_that_does_not_fit_names_the_options_to_lower(tmp_path: Path, run: Run) -> None:
    folder = str(write(tmp_path / "m"))
    told = run("estimate", folder, "--models-memory-margin", "100000000", code=4).out
    assert told.endswith("usable when empty; lower --models-memory-margin (97656.2 GiB)\n")
    told = run("estimate", folder, "--models-memory-margin", "800", "--device-limit", "cpu=801", code=4).out
    either = "lower --models-memory-margin (800.0 MiB) or raise --device-limit (801.0 MiB)"
    assert f"usable when empty; {either}\n" in told
    told = run("estimate", folder, "--required-memory", "100000000", code=4).out
    assert "usable when empty; lower required-memory" in told
    told = run("estimate", folder, "--gpu-memory-utilization", "0.0001", code=4).out
    assert told.endswith("usable when empty; raise gpu-memory-utilization\n")


def test_the_settings_with_which_a_model_would_fit_are_named_with_their_values(
    tmp_path: Path, estimate: Estimate, run: Run
) -> None:
    words = [str(write(tmp_path / "m", max_position_embeddings=1 << 20)), "--ctx-size", "1000000", "--parallel", "1"]
    words += ["--models-memory-margin", "0"]
    limit = (estimate(*words)[1]["total"] >> 20) - 60 + SHARED
    code, said = estimate(*words, "--device-limit", f"cpu={limit}")
    assert (code, said["would_fit"]["together"]) == (4, False)
    first, second = said["would_fit"]["settings"][:2]
    assert (first.split(" = ")[0], second) == ("ctx-size", "kv-cache-dtype = int8")
    tokens = int(first.removeprefix("ctx-size = "))
    told = run("estimate", *words, "--device-limit", f"cpu={limit}", code=4).out
    assert f"to fit    set ctx-size = {tokens}, or kv-cache-dtype = int8" in told
    words[2] = str(tokens)
    assert estimate(*words, "--device-limit", f"cpu={limit}")[0] == 0
    words[2] = str(tokens + 16)
    assert estimate(*words, "--device-limit", f"cpu={limit}")[0] == 4


@pytest.mark.slow
def test_check_reports_changes_of_config_json_that_the_models_class_does_not_take(tmp_path: Path, run: Run) -> None:
    ini, llama = tmp_path / "models.ini", tiny.make("llama", tmp_path / "l")
    override = '{"num_experts": 5}'
    ini.write_text(f"[a]\nmodel = {llama}\nconfig-override = {override}\n")
    first, _ = run("check", str(ini), "--memory", code=4).out.splitlines()
    assert first.startswith("a: ")
    assert first.endswith('LlamaConfig has no member "num_experts"')


@pytest.mark.slow
def test_check_reports_architectures_whose_cache_the_engine_does_not_support(tmp_path: Path, run: Run) -> None:
    folder = tiny.make("llama", tmp_path / "m")
    config = transformers.OpenAIGPTConfig(vocab_size=512, n_embd=32, n_layer=1, n_head=2)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(folder)
    first, _ = run("check", "--memory", str(folder), code=4).out.splitlines()
    assert "architecture 'openai-gpt' cannot be served by this engine: its forward takes no cache" in first


def test_check_reports_models_that_no_empty_device_holds(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    large, ini = write(tmp_path / "large", max_position_embeddings=1 << 20), tmp_path / "models.ini"
    ini.write_text(
        f"[large]\nmodel = {large}\nctx-size = 1000000\nparallel = 1\n"
        f"[small]\nmodel = {write(tmp_path / 'small')}\n[hub]\nhf-repo = org/absent\n"
    )
    options = [str(ini), "--memory", "--models-memory-margin", "0"]
    limit = (estimate("large", "--models-preset", *options[:1], *options[2:])[1]["total"] >> 20) - 60
    run("check", *options, code=0)
    first, last = run("check", *options, "--device-limit", f"cpu={limit}", code=4).out.splitlines()
    assert first.startswith("large: cpu does not fit: ")
    assert "; raise --device-limit (" in first
    assert "; set ctx-size = " in first
    assert first.endswith(
        "; a static estimate, an upper bound: the exact one (router estimate --exact) decides, as at a load"
    )
    assert last.startswith("3 models, no fault: ")
    document = run("check", *options, "--json", "--device-limit", f"cpu={limit}", code=4).document
    assert document["does_not_fit"] == {"large": first}
    run("check", *options, "--device-limit", "cuda:9=5", code=2)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["no.body", "--demo"], 2, "is no model, no folder and no repository (org/name); models are: demo-chat, "),
        (["demo-cht", "--demo"], 2, "is no model, no folder and no repository (org/name); did you mean demo-chat?"),
        ([""], 2, "is no model, no folder and no repository"),
        ([__file__], 2, "is a file; name the model's folder"),
        (["demo:chta"], 2, "is no built-in model; there are chat, "),
        (["x/y", "--models-memory-margin", "cuda:9=1"], 2, "--models-memory-margin: 'cuda:9' is no device of this"),
        (["org/absent", "--offline"], 1, "are not here, and --offline forbids asking"),
        (["gpt2", "--offline"], 1, "the files of gpt2 at main are not here, and --offline forbids asking"),
        (["org/absent", "--offline", "--revision", "v9"], 1, "the files of org/absent at v9 are not here"),
        (["demo-chat", "--demo", "--alias", "x"], 2, "--alias is for a folder or a repository; demo-chat is a preset"),
        (["nobody", "--ctx-sise", "3"], 2, "No such option"),
    ],
)
def test_a_failure_has_a_message_and_an_exit_code(run: Run, words: list[str], code: int, message: str) -> None:
    said = run("estimate", *words, code=code)
    assert message in said.err
    assert said.out == ""


@pytest.mark.parametrize(("shards", "padding"), [(1, 0), (3, 0), (1, 200_000)])
def test_the_estimate_of_a_repository_equals_that_of_its_files_and_reads_only_headers(
    hub: Hub,
    tmp_path: Path,
    estimate: Estimate,
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
    padding: int,
) -> None:
    repo = f"org/m{shards}-{padding}"
    folder = write(hub.root / repo, shards=shards, padding=padding)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    code, said = estimate(repo, "--ctx-size", "256")
    assert (code, said["downloaded"]) == (0, False)
    here = estimate(str(folder), "--ctx-size", "256")[1]
    for segment in ("weights", "context", "compute", "runtime", "total"):
        assert said[segment] == here[segment]
    asked = [line for line in hub.journal(repo) if "/resolve/" in line and ".safetensors " in line]
    assert len(asked) == shards * (2 if padding else 1)
    assert all("bytes=" in line for line in asked), "never a whole file"
    assert not (tmp_path / "empty-cache").exists(), "nothing is kept"


def test_the_skeleton_has_the_weights_that_a_download_would_choose(hub: Hub, tmp_path: Path) -> None:
    folder = write(hub.root / "org" / "both", shards=2)
    (folder / "model.safetensors").write_bytes((folder / "model-00000-of-00002.safetensors").read_bytes())
    spare = tmp_path / "spare"
    hub_headers.skeleton("org/both", "main", spare, environ={"HF_ENDPOINT": hub.address})
    taken = ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert sorted(file.name for file in spare.iterdir()) == taken


def test_the_skeleton_has_a_quantization_that_is_not_in_config_json(hub: Hub, tmp_path: Path) -> None:
    folder = write(hub.root / "org" / "gptq")
    (folder / "model.safetensors").unlink()
    write_weights(folder / "gptq_model-4bit--1g.safetensors", {"model.layers.0.mlp.qweight": ("I32", [8, 128])})
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    hub_headers.skeleton("org/gptq", "main", tmp_path / "spare", environ={"HF_ENDPOINT": hub.address})
    found = checkpoint.read(tmp_path / "spare")
    assert (found.quantization, found.bits, found.group) == ("gptq", 4, 64)
    assert found == checkpoint.read(folder)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 403, "code": "GatedRepo"}, "is gated"),
        ({"status": 404, "code": "RepoNotFound"}, "has no such repository"),
        ({"status": 503}, "answers 503"),
        ({"token": "secret"}, "needs --hf-token"),
    ],
)
def test_an_error_of_the_hub_has_a_message(hub: Hub, tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    if not (hub.root / "org" / "refused").is_dir():
        write(hub.root / "org" / "refused")
    hub.fails(**{"org/refused": fault})
    with pytest.raises(RemoteError, match=message):
        hub_headers.skeleton("org/refused", "main", tmp_path / "spare", environ={"HF_ENDPOINT": hub.address})
    if "token" in fault:
        hub_headers.skeleton(
            "org/refused", "main", tmp_path / "spare", environ={"HF_ENDPOINT": hub.address}, token="secret"
        )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"adapter_config.json": "{}", "adapter_model.safetensors": "x"}, "is an adapter, which needs the model"),
        ({"model-q4.gguf": "x"}, "has GGUF files only: GGUF needs the llama-server engine"),
        ({"README.md": "x"}, "has no config.json"),
        (
            {"config.json": "{}", "pytorch_model.bin": "x"},
            "only pytorch_model.bin, whose sizes are not known from headers",
        ),
        ({"config.json": "{}", "tokenizer.json": "{}"}, "has no safetensors weights; choose"),
        (
            {"config.json": "{}", "a.safetensors": "x", "model.safetensors.index.json": '{"weight_map": {"w": "b"}}'},
            "lacks b, of which its weights are made",
        ),
    ],
)
def test_the_message_for_a_repository_without_a_model_says_what_it_has(
    hub: Hub,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    message: str,
) -> None:
    repo = f"org/{tmp_path.name}"
    (hub.root / repo).mkdir(parents=True)
    for name, content in files.items():
        (hub.root / repo / name).write_text(content)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    said = run("estimate", repo, code=1)
    assert said.err.startswith(f"router: {repo} ")
    assert message in said.err
    assert said.out == ""


def test_a_hub_that_ignores_ranges_costs_no_more_than_a_header(hub: Hub, tmp_path: Path) -> None:
    folder = write(hub.root / "org" / "whole-only", padding=200_000)
    hub.fails(**{"org/whole-only/model.safetensors": {"ranges": False}})
    hub_headers.skeleton("org/whole-only", "main", tmp_path / "spare", environ={"HF_ENDPOINT": hub.address})
    assert checkpoint.read(tmp_path / "spare") == checkpoint.read(folder)


def test_a_broken_weight_file_and_an_unreachable_hub_have_a_message(hub: Hub, tmp_path: Path) -> None:
    folder = write(hub.root / "org" / "broken")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(RemoteError, match="no safetensors file"):
        hub_headers.skeleton("org/broken", "main", tmp_path / "a", environ={"HF_ENDPOINT": hub.address})
    with pytest.raises(RemoteError, match="cannot be reached"):
        hub_headers.skeleton("org/broken", "main", tmp_path / "b", environ={"HF_ENDPOINT": "http://127.0.0.1:9"})


@pytest.mark.slow
def test_the_exact_estimate_is_that_of_the_worker_program(tmp_path: Path, estimate: Estimate, run: Run) -> None:
    folder = str(tiny.make("llama", tmp_path / "m"))
    static = estimate(folder, "--ctx-size", "128")[1]
    state, flags = tmp_path / "own", {"ctx-size": "128"}
    preset, facts = find_preset(folder, LoadedPresets({}), flags, {})[0], checkpoint.read(Path(folder))
    known = LearnedEstimates(state / "estimates.json")
    choice = Choice(devices=frozenset({DeviceId(LOCAL, HOST)}))
    weighed = Machine(Settings(), {}, tmp_path).estimate(preset, facts, choice)
    known.record(learned.key(facts, preset, ["cpu"], forked=True), weighed, [99 * MIB])
    words = [folder, "--ctx-size", "128", "--state-dir", str(state)]
    assert estimate(*words)[1]["source"] == "learned"
    code, said = estimate(*words, "--exact")
    assert (code, said["source"], said["context"]) == (0, "exact", static["context"])
    assert 0.25 * static["total"] < said["total"] < static["total"], "both are of a forked worker"
    assert said["forked"]
    between = (static["total"] + said["total"] >> 21) + SHARED
    words += ["--state-dir", str(tmp_path / "new"), "--models-memory-margin", "0", "--device-limit", f"cpu={between}"]
    assert "the exact one (router estimate --exact) decides" in run("estimate", *words, code=4).out
    assert estimate(*words, "--exact")[0] == 0
    words = words[:5]
    known.record(learned.key(facts, preset, ["cpu"], forked=True), weighed, [9 << 30])
    limit = (weighed.total >> 20) + 8 + SHARED
    code, said = estimate(*words, "--device-limit", f"cpu={limit}", "--models-memory-margin", "0")
    assert (code, said["source"]) == (0, "static"), "a learned figure refuses no model"
    assert [estimate(*words, *more)[1]["source"] for more in (["--forget"], [])] == ["static", "static"]
    (Path(folder) / "tokenizer.json").unlink()
    (Path(folder) / "tokenizer_config.json").unlink()
    code, said = estimate(folder, "--exact")
    assert code == 1
    assert "tokenizer" in said["error"]["message"]
