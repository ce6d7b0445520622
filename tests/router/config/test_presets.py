"""Resolution of presets: keys, precedence, problems."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import preset_keys
from router.config.effective import args, effective
from router.config.ini import Problem
from router.config.model_source import FoundModel
from router.config.precedence import ProblemCollector
from router.config.presets import ALL_DEVICES, GGUF, KEYS, same_load
from router.config.resolve import LoadedPresets
from tests.router.preset_texts import Disk, complaint, complaints, one, read
from worker.fetch import demo
from worker.protocol.memory import MIB

CONFIG = Path(__file__).parents[3] / "config"


def warnings(text: str, **rest: Any) -> list[str]:
    loaded = read(text, **rest)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return [str(warning) for warning in loaded.warnings]


# Keys and values


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--ctx_size = 4096", "ctx_size", 4096),
        ("LLAMA_ARG_CTX_SIZE = 4096", "ctx_size", 4096),
        ("max-model-len = 0", "ctx_size", 0),
        ("max-model-len = 16k", "ctx_size", 16_000),
        ("max-model-len = 16K", "ctx_size", 16_384),
        ("max-model-len = 4.1k", "ctx_size", 4_100),
        ("kv-tokens = auto", "kv_tokens", 0),
        ("cache-type-k = q4_0\nctv = int4", "kv_cache_dtype", "int4"),
        ("LLAMA_ARG_CACHE_TYPE_V = f16", "kv_cache_dtype", "f16"),
        ("cache-8bit = off", "kv_cache_dtype", "auto"),
        ("np = -1", "parallel", 0),
        ("ub = 128", "prefill_chunk", 128),
        ("", "chunk", 0),
        ("b = 64", "chunk", 64),
        ("batch-size = 4096", "chunk", 512),
        ("batch-size = 4096\nubatch-size = 1024", "chunk", 1024),
        ("ub = 4096", "chunk", 4096),
        ("max-input-len = 5", "max_input_tokens", 5),
        ("n = -2", "n_predict", -1),
        ("spec-type = ngram-map-k4v", "spec_type", "ngram-simple"),
        ("draft = 5", "draft_max", 5),
        ("md = org/name", "model_draft", "hub:org/name:main"),
        ("hf-repo-draft = org/name:v1", "model_draft", "hub:org/name:v1"),
        ("request-timeout = -1", "request_timeout", 0.0),
        ("torch-dtype = bf16", "dtype", "bfloat16"),
        ("load-in-8bit = off", "quantization", "auto"),
        ("fa = auto", "attention", "auto"),
        ("t = -1", "threads", 0),
        ("ENABLE_CUDA_GRAPHS = on", "enforce_eager", False),
        ("s = 42", "seed", 42),
        ("ngl = 99", "device", ()),
        ("required-memory-mb = cuda:0=9000,cpu=1500", "required_memory", {"cuda:0": 9000 * MIB, "cpu": 1500 * MIB}),
        ('config-override = {"b": 1, "a": 2}', "config_override", '{"a":2,"b":1}'),
        ("embeddings = off", "task", "auto"),
        ("embd-normalize = -1", "embd_normalize", -1),
        ("a = x, y , m", "aliases", ("x", "y")),
        ("stop = a,b", "sampling", {"stop": ("a", "b")}),
        ('stop = ", "', "sampling", {"stop": (", ",)}),
        ('stop-sequence = ["a,b", "c"]', "sampling", {"stop": ("a,b", "c")}),
        ("no-pin = off", "pin", True),
        ("keep-alive = 10m", "ttl", 600.0),
        ("sleep-idle-seconds = 5m\nttl = 1h", "sleep_idle", 300.0),
        ("num-workers = 1-3", "replicas", (1, 3)),
        ("", "replicas", (1, 1)),
        ("ttl = -1", "ttl", -1.0),
        ("idle-grace = auto", "idle_grace", -1.0),
        ("idle-grace = -1", "idle_grace", 0.0),
        ("python = python3.12", "python", "python3.12"),
        ("logit-bias = 15043+1,9-inf", "sampling", {"logit-bias": {"15043": 1.0, "9": False}}),
        ('l = {"5": -1}', "sampling", {"logit-bias": {"5": -1}}),
        ("sampler-seq = edkpt", "sampling", {"samplers": ("penalties", "dry", "top_k", "top_p", "temperature")}),
        ('j = {"type": "object"}', "sampling", {"json-schema": '{"type":"object"}'}),
        ("rea = on", "chat_template_kwargs", '{"enable_thinking":true}'),
        (
            'reasoning = off\nchat-template-kwargs = {"enable_thinking": true}',
            "chat_template_kwargs",
            '{"enable_thinking":true}',
        ),
        ("rope-scaling = yarn\nyarn-ext-factor = 0", "rope", {"rope-scaling": "linear"}),
        ("compress_pos_emb = 1.0\nalpha_value = 1.0\nrope-freq-base = 0.0\nrope-freq-scale = 1", "rope", {}),
        ("yarn-attn-factor = 1.0\nyarn-beta-slow = 1.0\nyarn-beta-fast = 32.0", "rope", {}),
        ("env.A_b = x", "env", {"A_b": "x"}),
        ("env = A=1, B=x=y\nenv.B = 2", "env", {"A": "1", "B": "2"}),
    ],
)
def test_a_key_sets_its_field_in_any_spelling(line: str, field: str, value: Any) -> None:
    assert getattr(one(line), field) == value


@pytest.mark.parametrize(
    "line",
    [
        "replicas = 1", "split-mode = none", "sm = auto", "fitc = 4096", "ngl = 20", "ngl = 999", "cb = 1",
        "gpu-balance = on", "sleep-idle-seconds = -1", "cpu-offload = 0", "b = 2048", "stream-interval = 1",
        "pipeline-parallel = 1",
    ],
)  # fmt: skip
def test_a_value_that_matches_the_behaviour_is_accepted_for_a_key_that_is_not_offered(line: str) -> None:
    assert warnings(f"[m]\nmodel = demo:a\n{line}") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model-draft = ./x", "and it is not org/name of the hub"),
        ("spec-type = draft-eagle3", "draft-eagle3 is not offered by this version"),
        ("cpu-offload = 4", "device = cpu keeps all of it in host memory"),
        ("rope-freq-scale = 0.5\nrope-scale = 4", "rope-freq-scale is 1 / rope-scale, which is 4"),
        ("alpha_value = 0.5", 'alpha_value: "0.5" is not a number from 1 to'),
        ("cmd = x", "only engine"),
        ("load-format = gguf", "gguf is not offered by this version: GGUF needs the llama-server engine"),
        ("attention = flash", "leave attention at auto, which uses PyTorch's FlashAttention kernel"),
    ],
)
def test_a_key_that_is_not_offered_is_rejected_with_the_remedy(line: str, message: str) -> None:
    problem = complaint(line)
    assert problem.startswith("models.ini:3: [m] ")
    assert message in problem


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ctx-sise = 1", 'unknown key "ctx-sise"; did you mean "ctx-size"?'),
        ("C = 1x\nzzz = 1", 'unknown key "zzz"'),
        ("max-model-len = 1.5K", 'max-model-len: "1.5K" is not a whole number from 0 to 2147483648, nor auto'),
        ("no-pin = perhaps", 'no-pin: "perhaps" is neither on nor off'),
        ("start-timeout = -1", "start-timeout: this time cannot be turned off (-1)"),
        ("ctk = f16\nctv = q8_0", "ctv: ctk is f16, and both must agree; write one kv-cache-dtype"),
        ("config-override = {]", 'config-override: "{]" is not JSON'),
        ("logit-bias = 5", 'logit-bias: "5" is not a token id with a bias; write 15043+1 or 15043-inf'),
        ("logit-bias = 5+inf", 'logit-bias: "5+inf" is not a token id with a bias; write 15043+1 or 15043-inf'),
        ("samplers = top_k;best", "is not a list of samplers, each once, among penalties"),
        ("samplers = kk", "is not a list of samplers"),
        ("json-schema = [1]", 'json-schema: "[1]" is not a JSON object'),
        ("grammar-file = gone", "grammar-file: /etc/llm/gone: no such file or directory"),
        ("grammar = x\ngrammar-file = gone", "grammar and grammar-file are both set; remove one"),
        ("grammar = x\njson-schema = {}", "grammar and json-schema both constrain answers; remove one"),
        ("chat-template-file = gone.jinja", "chat-template-file: /etc/llm/gone.jinja: no such file or directory"),
        ("chat-template-file = /x/not-utf8", "is not UTF-8 text"),
        ("tokenizer = org/name", "tokenizer: no folder /etc/llm/org/name, and not the model's own repository; downl"),
        ("python = ./gone", "python: no file /etc/llm/gone"),
        (
            'speculative-config = {"model": "a/b", "draft_tensor_parallel_size": [2]}',
            "the draft model is on one device; remove draft_tensor_parallel_size",
        ),
        ("alias = a b", 'alias: "a b" is no model name'),
        ("env = A", "env: write NAME=value"),
        ("env.1A = x", 'unknown key "env.1A"'),
        ("env.CUDA_VISIBLE_DEVICES = 0", "write device = instead"),
        ("replicas = 3-1", 'replicas: "3-1" is not a number from 1 to 1000, nor two such as 1-3'),
        ("revision = v1", "revision belongs to a repository of the hub"),
        ("ctx-size = 10\nmax-input-tokens = 11", "max-input-tokens must not be more than ctx-size"),
        ("min-residency = 11", "min-residency must not be more than --swap-patience, 10 s"),
        (
            "ngl = 0\ndevice = cuda:1",
            "n-gpu-layers = 0 means device = cpu, but device is cuda:1; remove one of the two",
        ),
        ("chat-template = {{ x }}\nchat-template-file = qwen.jinja", "are both set; remove one"),
        ("hf-repo = a/b", "hf-repo and model (line 2) both name a source; remove one"),
        ("LLAMA_ARG_PORT = 1", "use --port"),
        ("sleep-memory = 1", "use --sleep-memory"),
    ],
)
def test_a_wrong_setting_names_file_line_section_and_the_way_out(line: str, message: str) -> None:
    problem = complaint(line, disk=Disk(_etc_llm_qwen_jinja="x"))
    assert problem.startswith("models.ini:")
    assert "[m] " in problem
    assert message in problem


@pytest.mark.parametrize("text", ["a/b", "a/b/", "a/b:v1"])
def test_the_tokenizer_of_the_models_own_repository_is_the_models(text: str) -> None:
    loaded = read(f"[m]\nhf-repo = a/b:v1\ntokenizer = {text}")
    assert (loaded.problems, loaded.warnings) == ((), ())
    assert loaded.presets["m"].tokenizer == ""


def test_options_without_meaning_are_warned_of_once_each_and_errors_when_strict() -> None:
    text = "[a]\nmodel = demo:a\nnuma = x\nno-mmap = 1\nno-jinja = on\n[b]\nmodel = demo:b\nnuma = y\nmmproj = z\n"
    others = [
        'models.ini:4: [a] "no-mmap" has no meaning here; remove it',
        'models.ini:5: [a] "no-jinja" has no meaning here; chat templates are always Jinja',
        'models.ini:9: [b] "mmproj" has no meaning here; images need no file of their own',
    ]
    numa = 'models.ini:3: [a] "numa" has no meaning here; remove it'
    assert warnings(text) == [f"{numa}; the same in [b]", *others]
    both = [numa, *others[:2], 'models.ini:8: [b] "numa" has no meaning here; remove it', others[2]]
    assert complaints(text, strict=True) == both


def test_a_repeated_key_is_warned_of_and_the_last_counts() -> None:
    text = "[m]\nmodel = demo:a\nctx-size = 1\nc = 2\n"
    assert warnings(text) == ['models.ini:4: [m] "c" repeats "ctx-size" of line 3; the last counts']
    assert read(text).presets["m"].ctx_size == 2


def test_types_of_keys_and_of_values_agree_wherever_both_are_written() -> None:
    model = "[m]\nmodel = demo:a\n"
    both = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CACHE_TYPE_V": "q8_0"}
    assert read(model, environ=both).presets["m"].kv_cache_dtype == "int8"
    (problem,) = complaints(model, environ={**both, "LLAMA_ARG_CACHE_TYPE_V": "f16"})
    assert problem == "LLAMA_ARG_CACHE_TYPE_V: cache-type-k is int8, and both must agree; write one kv-cache-dtype"
    assert read(model, flags={"ctk": "q4_0", "cache-type-v": "int4"}).presets["m"].kv_cache_dtype == "int4"
    assert complaints(model, flags={"ctk": "q4_0", "ctv": "q8_0"}) == [
        "--ctv: ctk is int4, and both must agree; write one kv-cache-dtype"
    ]
    assert complaints(model, flags={"ctk": "q4_0", "kv-cache-dtype": "int4"}) == [
        "--kv-cache-dtype: --ctk sets the same key; give one of the two"
    ]
    assert warnings(f"{model}ctk = q8_0\ncache-type-v = q8_0") == []
    assert warnings(f"{model}ctk = q8_0\nkv-cache-dtype = f16") == [
        'models.ini:4: [m] "kv-cache-dtype" repeats "ctk" of line 3; the last counts'
    ]


def test_all_faults_of_all_sections_are_reported() -> None:
    text = "x = 1\n[a]\nmodel = demo:q\nctxx = 1\n[b]\n[c]\nparallel = no\n[a]\n"
    assert [line.split(":")[1] for line in complaints(text)] == ["1", "8", "4", "3", "5", "7", "6", "8"]


def test_the_time_per_fault_does_not_grow_with_their_number() -> None:
    compared = []

    class Compared(Problem):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return super().__eq__(other)

        __hash__ = Problem.__hash__

    collector, place = ProblemCollector(), Compared("models.ini", 1, "a", "", "")
    for number in range(2000):
        collector.fail(place, f"fault {number}")
        collector.warn(place, f"warning {number}")
    assert len(collector.problems) == len(collector.warnings) == 2000
    assert len(compared) < 2000  # equal hashes only; a comparison with each other would be 4 million


# Sources


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("model = demo:chat", {"demo": "chat"}),
        ("model = models/qwen", {"path": "/etc/llm/models/qwen"}),
        ("model = /etc/llm/models/qwen", {"path": "/etc/llm/models/qwen"}),
        ("m = ~/snap", {"path": "/home/you/snap"}),
        ("model = Qwen/Qwen3-0.6B", {"repo": "Qwen/Qwen3-0.6B", "revision": "main"}),
        ("hf = Qwen/Qwen3-0.6B:v1.0", {"repo": "Qwen/Qwen3-0.6B", "revision": "v1.0"}),
        ("model = gpt2", {"repo": "gpt2", "revision": "main"}),
        ("hf-repo = bert-base-uncased:v1", {"repo": "bert-base-uncased", "revision": "v1"}),
        ("hf-repo = a/b\nrevision = refs/pr/1", {"repo": "a/b", "revision": "refs/pr/1"}),
    ],
)
def test_a_model_is_a_folder_a_repository_or_built_in(line: str, fields: Mapping[str, str]) -> None:
    loaded = read(f"[m]\n{line}", disk=Disk("/home/you/snap/config.json"), environ={"HOME": "/home/you"})
    assert not loaded.problems
    preset = loaded.presets["m"]
    assert {name: getattr(preset, name) for name in ("path", "repo", "demo") if getattr(preset, name)} == {
        name: value for name, value in fields.items() if name != "revision"
    }
    assert preset.revision == fields.get("revision", "main")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "models.ini:1: [m] names no model; add model = a folder or org/name, or hf-repo = org/name"),
        (
            "model = demo:chta",
            '"demo:chta" is no built-in model; there are chat, embed, a, b, c; did you mean "demo:chat"?',
        ),
        ("model = gpt.2", '"gpt.2" is neither a folder (/etc/llm/gpt.2) nor org/name'),
        ("model = /gone", '"/gone" is neither a folder nor org/name'),
        ("hf-repo = org/name:IQ2_XS", "GGUF needs the llama-server engine"),
        ("model = s3://bucket/x", "is a URL; download the model"),
        ("model = empty", "/etc/llm/empty has no config.json"),
        ("model = sbert", "/etc/llm/sbert has no config.json; the model is in 0_Transformer; a newer sentence-transf"),
        ("model = note.txt", "/etc/llm/note.txt is a file; name the model's folder"),
        ("hf-repo = name.x", '"name.x" is not org/name'),
        ("hf-repo = ../x", '"../x" is not org/name'),
        ("hf-repo = a/b:v1\nrevision = v2", "a revision stands in line 2 already; remove one of the two"),
        ("hf-repo = a/b\nrevision = ../x", "is no branch, tag or commit"),
    ],
)
def test_a_source_that_cannot_be_used_is_explained(line: str, message: str) -> None:
    old = ("/etc/llm/sbert/", "/etc/llm/sbert/0_Transformer/")
    disk = Disk("/etc/llm/empty/", "/etc/llm/note.txt", "/etc/llm/x.gguf", *old)
    (problem,) = complaints(f"[m]\n{line}", disk=disk)
    assert message in problem


def test_a_relative_path_starts_at_the_file_and_is_found_in_the_working_directory_with_a_warning() -> None:
    disk = Disk("/home/me/snap/config.json")
    loaded = read("[m]\nmodel = snap", disk=disk)
    assert loaded.presets["m"].path == "/home/me/snap"
    (warning,) = loaded.warnings
    assert "snap is not in /etc/llm but in the working directory; write /home/me/snap" in str(warning)


def test_models_on_disk_are_listed_and_sections_configure_them() -> None:
    found = [
        FoundModel("phi", "models_dir", path="/m/phi"),
        FoundModel("Qwen/Qwen3", "cache", repo="Qwen/Qwen3", revision="main"),
        FoundModel("PHI", "cache", repo="x/phi"),
    ]
    loaded = read("[*]\nctx-size = 100\n[qwen/qwen3]\nparallel = 2\nalias = q", found=found)
    assert not loaded.problems
    assert list(loaded.presets) == ["qwen/qwen3", "phi"]  # the folder's phi wins over the cache's PHI
    qwen, phi = loaded.presets.values()
    assert (qwen.source, qwen.repo, qwen.parallel, qwen.ctx_size) == ("preset", "Qwen/Qwen3", 2, 100)
    assert (phi.source, phi.path, phi.ctx_size) == ("models_dir", "/m/phi", 100)


def test_a_section_may_hide_the_cached_repository_it_uses() -> None:
    found = [FoundModel("a/b", "cache", repo="a/b")]
    text = "[m]\nhf-repo = a/b\n"
    assert list(read(text, found=found).presets) == ["m", "a/b"]
    assert list(read(text + "dedup-cache-models = on", found=found).presets) == ["m"]


def test_the_source_of_a_section_takes_precedence_over_a_model_on_disk() -> None:
    loaded = read("[phi]\nmodel = demo:a", found=[FoundModel("phi", "models_dir", path="/m/phi")])
    assert loaded.presets["phi"].demo == "a"
    assert loaded.presets["phi"].path == ""


# Names


def test_ids_and_aliases_are_unique_together() -> None:
    text = "[a]\nmodel = demo:a\nalias = b, x\n[b]\nmodel = demo:b\nalias = x\n"
    assert complaints(text) == [
        'models.ini:3: [a] alias "b" is the id of another model; choose another',
        'models.ini:6: [b] alias "x" is already an alias of a; choose another',
    ]


def test_a_model_on_disk_gives_way_to_an_alias() -> None:
    loaded = read("[a]\nmodel = demo:a\nalias = x/y\n", found=[FoundModel("x/y", "cache", repo="x/y")])
    assert list(loaded.presets) == ["a"]
    assert [str(warning) for warning in loaded.warnings] == ['x/y: is not listed: "x/y" is an alias of another model']
    text, disk = "[a]\nmodel = /m/llama\nalias = llama\n", Disk("/m/llama/config.json")
    loaded = read(text, disk, found=[FoundModel("llama", "models_dir", path="/m/llama")])
    assert (list(loaded.presets), loaded.warnings) == (["a"], ()), "it is the same model"


@pytest.mark.parametrize("line", ["model = demo:a", "hf-repo = a/b", "alias = x", "revision = v1"])
def test_a_key_of_one_model_is_rejected_in_the_defaults_and_as_a_flag(line: str) -> None:
    key, _, value = line.partition(" = ")
    (problem,) = complaints(f"[*]\n{line}\n[m]\nmodel = demo:a")
    assert problem == f"models.ini:2: [*] {key}: names one model, so it cannot stand in [*]; write it into [id]"
    (problem,) = complaints("[m]\nmodel = demo:a", flags={key: value})
    assert problem.startswith(f"--{key}: is for one model, and none is named at start; name one alone, or write a")


# Precedence


def test_flags_win_over_sections_over_defaults_over_the_environment() -> None:
    environ = {"ROUTER_CTX_SIZE": "1", "ROUTER_PARALLEL": "1", "ROUTER_SEED": "1", "LLAMA_ARG_THREADS": "1"}
    text = "[*]\nctx-size = 2\nparallel = 2\nseed = 2\n[m]\nmodel = demo:a\nctx-size = 3\nparallel = 3\n"
    preset = read(text, environ=environ, flags={"c": "4"}).presets["m"]
    assert (preset.ctx_size, preset.parallel, preset.seed, preset.threads, preset.n_predict) == (4, 3, 2, 1, -1)
    origins = {key: origin for key, _, origin in effective(preset)}
    assert origins["ctx-size"] == "-c"
    assert origins["parallel"] == "models.ini:8"
    assert origins["seed"] == "models.ini:4"
    assert origins["threads"] == "LLAMA_ARG_THREADS"
    assert origins["n-predict"] == "built-in"
    assert origins["model"] == "models.ini:6"


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["OPTION_MAX_ROLLING_BATCH_SIZE", "MAX_BATCH_SIZE"], {}),
        (["OPTION_BATCH_SIZE", "SERVING_BATCH_SIZE"], {"OPTION_ROLLING_BATCH": "disable"}),
    ],
)
def test_the_routers_variable_wins_over_llama_servers_and_that_over_lmis(
    names: list[str], beside: dict[str, str]
) -> None:
    names = ["ROUTER_PARALLEL", "LLAMA_ARG_N_PARALLEL", *names]
    for first in range(len(names)):
        environ = beside | {name: str(names.index(name) + 1) for name in names[first:]}
        assert one("", environ=environ).parallel == first + 1
        unread = [f"{name}: has no effect beside {names[first]}; remove one of the two" for name in names[first + 1 :]]
        assert warnings("[m]\nmodel = demo:a", environ=environ) == unread


@pytest.mark.parametrize("name", ["ROUTER_PARALLEL", "LLAMA_ARG_N_PARALLEL"])
def test_a_variable_of_the_router_or_llama_server_wins_over_lmis_way_to_batch(name: str) -> None:
    environ = {name: "2", "OPTION_ROLLING_BATCH": "disable"}
    assert one("", environ=environ).parallel == 2
    (warning,) = warnings("[m]\nmodel = demo:a", environ=environ)
    assert warning == f"OPTION_ROLLING_BATCH: has no effect beside {name}; remove one of the two"


def test_a_part_of_an_object_in_a_variable_without_effect_is_named() -> None:
    scaling = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}'
    environ = {"LLAMA_ARG_ROPE_SCALE": "8", "OPTION_ROPE_SCALING": scaling}
    assert one("", environ=environ).rope == {"rope-scaling": "yarn", "rope-scale": 8, "yarn-orig-ctx": 512}
    (warning,) = warnings("[m]\nmodel = demo:a", environ=environ)
    assert warning == (
        "OPTION_ROPE_SCALING: its rope-scale has no effect beside LLAMA_ARG_ROPE_SCALE; remove one of the two"
    )


def test_variables_that_complete_each_other_cause_no_warning() -> None:
    environ = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CACHE_TYPE_V": "q8_0"}
    assert warnings("[m]\nmodel = demo:a", environ=environ) == []


def test_variables_of_the_router_itself_are_left_to_it() -> None:
    assert one("", environ={"ROUTER_QUEUE_SIZE": "5", "LLAMA_ARG_PORT": "9", "ROUTER_URL": "x"}).queue_size == 1000


def test_unknown_variables_and_those_of_one_model_cause_a_warning() -> None:
    environ = {"ROUTER_CTX_SISE": "1", "ROUTER_PARALLEL": "", "LLAMA_ARG_ALIAS": "x", "OPTION_FOO": "1", "PATH": "/"}
    assert warnings("[m]\nmodel = demo:a", environ=environ) == [
        'ROUTER_CTX_SISE: is not a variable of this router; did you mean "ROUTER_CTX_SIZE"?',
        "LLAMA_ARG_ALIAS: is for one model, and none is named at start, so it is not read; write a section in a file"
        " for --models-preset",
        "OPTION_FOO: is not a variable of this router",
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("OPTION_MAX_MODEL_LENN", "OPTION_MAX_MODEL_LEN"),
        ("SERVING_JOB_QUEUE_SIZ", "SERVING_JOB_QUEUE_SIZE"),
        ("LLAMA_ARG_CTX_SISE", "LLAMA_ARG_CTX_SIZE"),
        ("ROUTER_MODEL_MAX", "ROUTER_MODELS_MAX"),
    ],
)
def test_an_unknown_variable_is_reported_with_the_nearest_one_and_an_error_if_strict(name: str, near: str) -> None:
    line = f'{name}: is not a variable of this router; did you mean "{near}"?'
    assert warnings("[m]\nmodel = demo:a", environ={name: "1"}) == [line]
    assert complaints("[m]\nmodel = demo:a", environ={name: "1"}, strict=True) == [line]


def test_the_message_about_a_refused_flag_has_no_value() -> None:
    (problem,) = complaints("", flags={"list-devices": "on"})
    assert problem.startswith("--list-devices: is not offered by this version: remove it; ")


def test_a_wrong_flag_is_reported_once_for_all_models() -> None:
    text = "[a]\nmodel = demo:a\n[b]\nmodel = demo:b"
    assert complaints(text, flags={"ctx-size": "x"}) == [
        '--ctx-size: "x" is not a whole number from 0 to 2147483648, nor auto'
    ]
    assert complaints(text, flags={"min-residency": "1h"}) == [
        "--min-residency: min-residency must not be more than --swap-patience, 10 s"
    ]


def test_a_flag_given_in_two_spellings_is_a_contradiction() -> None:
    assert complaints("", flags={"ctx-size": "1", "c": "2"}) == [
        "-c: --ctx-size sets the same key; give one of the two"
    ]


def test_flags_may_be_negated() -> None:
    preset = one("pin = on\nautoload = on", flags={"no-pin": "on", "autoload": "off"})
    assert (preset.pin, preset.autoload) == (False, False)


def test_no_model_drafts_with_spec_type_none_that_is_stated_as_strongly_as_the_model() -> None:
    body = "[m]\nmodel = demo:a\nmodel-draft = org/small\n"
    assert read(f"{body}spec-type = draft-mtp").presets["m"].drafts_by_model
    assert read(f"{body}spec-default = off").presets["m"].drafts_by_model, "it is about drafts from the text"
    assert read(f"[*]\nspec-type = none\n{body}").presets["m"].drafts_by_model, "[*] is for the other models"
    for loaded in (read(f"{body}spec-type = none"), read(body, flags={"spec-type": "None"})):
        assert not loaded.presets["m"].speculates
        (warning,) = loaded.warnings
        assert warning.message == "model-draft has no effect: spec-type = none turns it off; remove one of the two"


def test_gpu_layers_and_device_follow_precedence() -> None:
    assert one("device = cuda:1", flags={"ngl": "0"}).device == ("cpu",)
    text = "[*]\nngl = 0\n[m]\nmodel = demo:a\ndevice = {}"
    assert read(text.format("cuda:1")).presets["m"].device == ("cuda:1",)
    assert read(text.format("auto")).presets["m"].device == ()
    assert read(text.format("cpu")).presets["m"].device == ("cpu",)


def test_a_template_is_read_from_its_file_and_the_stronger_spelling_counts() -> None:
    disk = Disk(_etc_llm_t="{{ file }}")
    preset = one("chat-template-file = t", disk=disk)
    assert (preset.chat_template, preset.chat_template_file) == ("{{ file }}", "/etc/llm/t")
    text = "[*]\nchat-template-file = t\n[m]\nmodel = demo:a\nchat-template = {{ own }}"
    preset = read(text, disk=disk).presets["m"]
    assert (preset.chat_template, preset.chat_template_file) == ("{{ own }}", "")


# Seen from outside


def test_the_effective_settings_name_every_key_and_mask_secrets() -> None:
    preset = one('env.API = abc\nchat-template-kwargs = {"api_key": "abc", "x": [{"token": "abc"}], "tokens": 3}')
    rows = effective(preset)
    names = {key.name for key in KEYS} - {
        "env", "hf-repo", "revision", "n-gpu-layers", "import", "min-workers", "max-workers", "grammar-file",
        "json-schema-file", "reasoning", "reasoning-effort",
    }  # fmt: skip
    assert {key for key, _, _ in rows} == names | {"env.API"}
    assert "abc" not in json.dumps(rows) + json.dumps(args(preset))
    assert ("chat-template-kwargs", '{"api_key":"***","tokens":3,"x":[{"token":"***"}]}', "models.ini:4") in rows
    assert all(isinstance(part, str) for row in rows for part in row)


def test_flags_contain_only_values_that_differ_from_the_defaults() -> None:
    assert args(one("c = 100\nautoload = off\npin = off\nstop = a\nenv.X = 1")) == [
        "--model", "demo:a", "--ctx-size", "100", "--stop", '["a"]', "--no-autoload", "--env", "X=***",
    ]  # fmt: skip
    assert args(read("[m]\nhf-repo = a/b").presets["m"]) == ["--hf-repo", "a/b", "--revision", "main"]


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "ctx-size": st.integers(0, 1 << 20).map(str),
        "parallel": st.integers(1, 64).map(str),
        "alias": st.lists(st.from_regex(r"[a-z]{2,5}", fullmatch=True), min_size=1, max_size=3).map(",".join),
        "temp": st.floats(0, 2).map(repr),
        "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=3).map(json.dumps),
        "ttl": st.integers(-1, 1000).map(str),
        "replicas": st.sampled_from(["2", "1-3"]),
        "pin": st.sampled_from(["on", "off"]),
        "device": st.sampled_from(["auto", "cpu", "0", "cuda:0,cuda:1", "GPU-12-ab"]),
        "required-memory": st.sampled_from(["900", "1.5GiB", "cuda:0=9,cpu=1", "700001B"]),
        "chat-template-kwargs": st.dictionaries(st.text(max_size=4), st.integers(), max_size=3).map(json.dumps),
        "dtype": st.sampled_from(["auto", "fp16"]),
        "idle-grace": st.sampled_from(["auto", "0.5", "-1"]),
        "request-timeout": st.sampled_from(["-1", "5m"]),
    },
)


@given(SETTINGS)
def test_the_flags_of_a_preset_make_the_same_preset_again(wanted: dict[str, str]) -> None:
    loaded = read("[m]\nmodel = demo:a\n" + "".join(f"{key} = {value}\n" for key, value in wanted.items()))
    assert not loaded.problems
    preset = loaded.presets["m"]
    lines = ["[m]"]
    words = args(preset)
    while words:
        name = words.pop(0)
        value = words.pop(0) if words and not words[0].startswith("--") else "on"
        lines.append(f"{name} = {value}")
    assert read("\n".join(lines)).presets["m"] == preset


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("[]=\n"), max_size=300))
def test_any_file_is_read_without_an_exception(text: str) -> None:
    assert isinstance(read(text, environ={}), LoadedPresets)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(preset_keys.BY_SPELLING)), st.text(st.characters(codec="utf-8"), max_size=12))
    )
)
def test_any_value_of_any_key_is_read_without_an_exception(pairs: list[tuple[str, str]]) -> None:
    body = "".join(f"{key} = {json.dumps(value)}\n" for key, value in pairs)
    assert isinstance(read(f"[m]\n{body}"), LoadedPresets)
    assert isinstance(read("[m]\nmodel = demo:a", flags=dict(pairs)), LoadedPresets)


# Hot reload


def test_spelling_order_and_comments_change_nothing() -> None:
    first = read('[*]\nc = 1024\n[m]\nmodel = demo:a\nconfig-override = {"a": 1, "b": 2}\n')
    second = read('; hello\n[m]\nconfig-override = {"b":2,"a":1}\nLLAMA_ARG_CTX_SIZE = 1024 ; here\nmodel = demo:a\n')
    assert first.presets == second.presets


@pytest.mark.parametrize("line", ["alias = x", "tags = x", "pin = on", "priority = 3", "ttl = 5", "queue-size = 5",
                                  "autoload = off", "min-residency = 1", "stall-timeout = 5"])  # fmt: skip
def test_a_live_key_leaves_the_worker_alone(line: str) -> None:
    assert preset_keys.BY_NAME[line.split()[0]].live
    assert one(line) != one("")
    assert same_load(one(line), one(""))


@pytest.mark.parametrize("line", ["ctx-size = 5", "dtype = fp32", "device = cpu", "env.X = 1", "temp = 0.1",
                                  "chat-template = {{ x }}", "required-memory = 5", "seed = 3"])  # fmt: skip
def test_any_other_key_needs_a_new_worker(line: str) -> None:
    assert not same_load(one(line), one(""))


# The tables


def test_grammars_of_files_are_defaults_of_requests_and_those_of_a_section_precede_others() -> None:
    disk = Disk(_etc_llm_g="root ::= x", _etc_llm_s='{"type": "array"}')
    assert one("grammar-file = g", disk=disk).sampling == {"grammar": "root ::= x"}
    assert one("jf = s", disk=disk).sampling == {"json-schema": '{"type":"array"}'}
    assert ("grammar", "root ::= x", "models.ini:3") in effective(one("grammar-file = g", disk=disk))
    general = "[*]\ngrammar-file = g\n[m]\nmodel = demo:a\n"
    assert read(f"{general}j =", disk).presets["m"].sampling == {"grammar": "root ::= x"}
    assert read(f'{general}j = {{"a": 1}}', disk).presets["m"].sampling == {"json-schema": '{"a":1}'}
    assert read(f"{general}grammar = root ::= y", disk).presets["m"].sampling == {"grammar": "root ::= y"}
    (problem,) = complaints("[m]\nmodel = demo:a\njf = g", disk=disk)
    assert problem.endswith('json-schema-file: /etc/llm/g: "root ::= x" is not JSON')


def test_reasoning_of_a_section_precedes_variables_for_all_models() -> None:
    general = '[*]\nchat-template-kwargs = {"enable_thinking": true, "x": 1}\n[m]\nmodel = demo:a\n'
    assert read(f"{general}reasoning = off").presets["m"].chat_template_kwargs == '{"enable_thinking":false,"x":1}'


def test_a_context_for_all_models_is_capped_and_one_of_a_section_is_not() -> None:
    loaded = read("[*]\nc = 4096\n[a]\nmodel = demo:a\n[b]\nmodel = demo:b\nc = 4096").presets
    assert (loaded["a"].caps_ctx, loaded["b"].caps_ctx) == (True, False)
    assert same_load(loaded["a"], dataclasses.replace(loaded["a"], caps_ctx=False))


def test_only_queue_size_and_names_of_models_are_keys_and_options_of_the_router() -> None:
    from router.config.settings import SPELLINGS, UNAVAILABLE

    names = {"model", "m", "model-path", "model-id", "model-names", "hf-repo", "hf", "hfr"}
    assert set(preset_keys.BY_SPELLING) & {*SPELLINGS, *UNAVAILABLE} == {"queue-size", *names}


def test_the_built_in_models_are_those_that_a_worker_makes() -> None:
    assert set(preset_keys.DEMOS) == set(demo.NAMES)


def test_the_reference_names_every_key_and_its_comments_are_right() -> None:
    lines = (CONFIG / "models.ini").read_text().splitlines()
    commented = [line[2:] for line in lines if line.startswith("; ") and " = " in line.split(";")[1]]
    entries = {line.split("=")[0].strip() for line in [*commented, *lines]}
    assert {key.name for key in KEYS} <= entries
    start, end = lines.index("[*]"), lines.index("[demo-chat]")
    body = [
        line.removeprefix("; ") for line in lines[start:end] if " = " in line or line.endswith("=") or " =  " in line
    ]
    loaded = read("[*]\n" + "\n".join(body) + "\n[m]\nmodel = demo:a", swap_patience=10.0)
    assert [str(problem) for problem in loaded.problems] == []


def test_prefetch_names_existing_models() -> None:
    body = "[a]\nmodel = demo:a\nalias = one\n[b]\nmodel = demo:b\nprefetch = "
    assert read(body + "a, one").presets["b"].prefetch == ("a", "one")
    assert 'prefetch names "aa", and there is no such model' in complaints(body + "a, aa")[0]


# Several devices


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("pipeline-parallel = 3", "pipeline_parallel", 3),
        ("pipeline-parallel-degree = max", "pipeline_parallel", ALL_DEVICES),
        ("gpu-split = 16,24.5", "gpu_split", (16 << 30, 49 << 29)),
        ("exllama-gpu-split = 0, 8000MiB", "gpu_split", (0, 8000 << 20)),
        ("gpu_memory_utilization = 85%", "gpu_memory_utilization", 0.85),
        ("ts = 1/0/2.5", "tensor_split", (1.0, 0.0, 2.5)),
    ],
)
def test_a_split_can_be_set_by_the_keys_of_several_servers(line: str, field: str, value: object) -> None:
    preset = one(line)
    assert getattr(preset, field) == value
    key = next(key for key in KEYS if key.field == field)
    assert key.kind(key.kind.write(value)) == value
    assert not same_load(preset, one("")), "it takes effect with a fresh worker"


def test_a_section_named_as_a_revision_of_a_repository_is_that_revision() -> None:
    cached = FoundModel("org/name:v2", "cache", repo="org/name", revision="v2")
    loaded = read("[org/name:v2]\n[org/name:main]\n[org/NAME:v3]\nctx-size = 512", found=[cached])
    sources = [(preset.source, preset.repo, preset.revision) for preset in loaded.presets.values()]
    assert sources == [("preset", "org/name", "v2"), ("preset", "org/name", "main"), ("preset", "org/NAME", "v3")]
    assert complaints("[org/name:Q4_K_M]") == [f"models.ini:1: [org/name:Q4_K_M] {GGUF}"]
    assert "a revision stands in line 1 already" in complaints("[org/name:v3]\nrevision = v4")[0]
    assert "names no model" in complaints("[org/name]")[0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("tensor-split = 1", 'tensor-split: "1" names no two shares; for one device, write device = it'),
        ("gpu-split = 0", "gpu-split: no size above 0 is given"),
        ("tensor-split = 1,1\ngpu-split = 8,8", "tensor-split and gpu-split both set the placement; remove one"),
        ("tensor-split = 1,1\npipeline-parallel = 3", "tensor-split is for 2 devices, pipeline-parallel for another"),
        ("pipeline-parallel = 2\nsplit-mode = none", "split-mode = none forbids what this asks for"),
        ("tensor-split = 1,1\ndevice = cpu", "needs accelerators, and device is cpu"),
        ("tp = 2\npipeline-parallel = 2", "pipeline-parallel splits it by layers, and this divides each: remove one"),
        ("tp = 2\nsplit-mode = layer", "split-mode = layer forbids what this asks for; remove one of the two"),
        ("split-mode = tensor\ntensor-split = 3,1", "all devices get equal parts of each matrix: remove tensor-split"),
        ("tp = max\ndevice = cpu", "max counts accelerators, and device is cpu; write how many processes"),
    ],
)
def test_a_split_that_contradicts_itself_is_refused(lines: str, message: str) -> None:
    assert message in complaint(lines)


@pytest.mark.parametrize(
    ("general", "own", "device"),
    [
        ("device = cuda:1", "main-gpu = 0", ("cuda:1",)),
        ("device = cuda:1", "mg = 0\nsplit-mode = none", ("cuda:0",)),
        ("main-gpu = 0\nsplit-mode = none", "device = cuda:1", ("cuda:1",)),
        ("", "device = cuda:1,cuda:2\nmain-gpu = 0", ("cuda:1", "cuda:2")),
        ("", "main-gpu = 0", ()),
    ],
)
def test_main_gpu_changes_the_devices_with_split_mode_none_only(
    general: str, own: str, device: tuple[str, ...]
) -> None:
    loaded = read(f"[*]\n{general}\n[m]\nmodel = demo:a\n{own}")
    assert loaded.presets["m"].device == device


def test_a_placement_on_accelerators_beside_the_cpu_causes_a_warning() -> None:
    (split,) = warnings("[m]\nmodel = org/m\ndevice = cpu\ngpu-split = 8\n")
    assert split.endswith("[m] gpu-split has no effect, because device is cpu; remove one of the two")
    (mode,) = warnings("[m]\nmodel = org/m\nngl = 0\nsplit-mode = layer\n")
    assert "split-mode has no effect" in mode
    assert warnings("[*]\ngpu-split = 8\n[m]\nmodel = org/m\ndevice = cpu\n") == [], "it is for other models"


def test_a_model_on_the_cpu_has_no_keys_of_accelerators_about_which_a_load_would_warn_again() -> None:
    preset = one("device = cpu\ngpu-split = 8\nsplit-mode = layer")
    assert (preset.gpu_split, preset.split_mode) == ((), "auto")
    assert not preset.origins.keys() & {"gpu-split", "split-mode"}


def test_each_variable_without_a_meaning_is_named_though_several_stand_for_one_option() -> None:
    names = ("FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION", "FASTCHAT_WORKER_HEART_BEAT_INTERVAL")
    warnings = read("[m]\nmodel = demo:a", environ=dict.fromkeys(names, "45")).warnings
    assert [str(warning).partition(":")[0] for warning in warnings] == [*names]
