"""The command line: real commands, in this process where nothing is served."""

import contextlib
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli import options
from router.config import preset_keys, presets, settings
from tests.router.cli.commands import Run, write
from tests.sparse import write_weights

ROOT = Path(__file__).parents[3]
ENVIRON = {"PATH": os.environ["PATH"], "HF_HUB_CACHE": "/nowhere", "PYTHONPATH": str(ROOT)}


def preset(folder: Path, text: str) -> str:
    path = folder / "models.ini"
    path.write_text(text)
    return str(path)


GOOD = "[a]\nmodel = demo:a\nctx-size = 512\nenv.API_KEY = hidden\n[b]\nmodel = demo:b\nalias = bee\n"
BAD = "[a]\nmodel = demo:a\nctx-sise = 512\n[b]\n"


# Serving


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models-preset", "missing.ini"], "missing.ini: no such file or directory\n"),
        (["--models-preset", "missing.ini", "serve"], "missing.ini: no such file or directory\n"),
        (["--port", "x"], '--port: "x" is not a whole number from 0 to 65535\n'),
        (["--api-key-file", "/gone"], "--api-key-file: /gone: no such file or directory\n"),
        (["--admin-key-file", "/usr"], "--admin-key-file: /usr: is a directory\n"),
        (["-np", "0"], '--np: "0" is not a whole number from 1 to 4096, nor -1, nor auto\n'),
        (["-m", "x.gguf"], "--model: [x.gguf] GGUF needs the llama-server engine, which this version does not offer;"),
        (["no.body"], '--model: [no.body] "no.body" is neither a folder ('),
        (["--demo", "a/b"], "--demo: models are named as well, and the demo models are not served beside others"),
        (["--default-model", "gpt-5"], '--default-model: there is no model "gpt-5"\n'),
        (["--models-preset", "/"], "/: is a folder; give it as --models-dir, or name an INI file\n"),
        (
            ["--models-dir", "/dev/null"],
            "--models-dir: /dev/null: is a file; give it as --models-preset, or name a folder",
        ),
        (["--strict-presets", "--numa", "x"], "--numa: has no meaning here; remove it\n"),
    ],
)
def test_a_configuration_error_is_one_line_and_exit_code_2(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_a_preset_file_that_is_named_as_a_model_is_answered_with_its_option(run: Run, tmp_path: Path) -> None:
    err = run(preset(tmp_path, "[a]\nmodel = demo:a\n"), code=2).err
    assert "is a file; give presets as --models-preset, or name the model's folder" in err


def test_all_faults_of_a_preset_are_printed_before_anything_starts(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, BAD)
    code, out, err = run("--models-preset", path)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f'{path}:3: [a] unknown key "ctx-sise"; did you mean "ctx-size"?',
        f"{path}:4: [b] names no model; add model = a folder or org/name, or hf-repo = org/name",
    ]
    assert gc.isenabled(), "again, after the failed start"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ctx-sise", "1"], "No such option '--ctx-sise'. Did you mean '--ctx-size'?"),
        (["serve", "--prot", "1"], "No such option '--prot'. Did you mean '--port'?"),
        (["ps", "--server", "x"], "No such option '--server'.\n"),
        (["ps", "--jsno"], "No such option '--jsno'. Did you mean '--json'?"),
        (["--zzzzzz"], "No such option '--zzzzzz'."),
        (["--log-file", "x"], "--log-file is not offered by this version; redirect stderr."),
        (["--port"], "Option '--port' requires an argument."),
        (["chek"], '"chek" is no command and no model. Did you mean check?'),
        (["load", "--help"], '"load" is no command and no model. The first request for a model loads it,'),
        (["unload", "a"], '"unload" is no command and no model. Send POST /models/unload to the running router.'),
        (["run", "org/name", "--url", "http://x"], "--url stands before MODEL: router run --url URL MODEL."),
        (["words", "-h"], '"words" is no command and no model.\n'),
        (["help"], '"help" is no command and no model. Use `router --help`.'),
        (["status"], '"status" is no command and no model. Use `router ps --all`.'),
        (["check", "--download-only"], "No such option '--download-only'."),
        (["--download-only", "check"], "--download-only does not belong to `check`."),
        (["check", "a.ini", "b.ini"], "a.ini and b.ini: one file of presets at a time; check each alone."),
        (["--port", "1", "estimate", "x"], "--port does not belong to `estimate`."),
        (["estimate", "x", "--port", "1"], "--port does not belong to `estimate`."),
        (["estimate", "x", "--no-models-watch"], "--no-models-watch does not belong to `estimate`."),
    ],
)
def test_an_unknown_option_is_an_error_with_the_nearest_known_one(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert f"Error: {message}" in err


def test_an_unsafe_key_file_stops_the_start(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret")
    path.chmod(0o644)
    message = f"--api-key-file: {path}: other users may read it; chmod 600 {path}\n"
    assert run("--api-key-file", str(path), code=2).err == message


def test_variables_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_MODELS_PRESET", "missing.ini")
    monkeypatch.setenv("ROUTER_MODELS_MAX", "-1")
    assert run()[2].startswith('ROUTER_MODELS_MAX: "-1" is not a whole number')
    assert run("--models-max", "1")[2] == "missing.ini: no such file or directory\n"


# Check


def test_a_right_preset_checks_with_exit_code_0(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, GOOD)
    for words in (["check", path], ["--models-preset", path, "check"], ["check", "--models-preset", path]):
        assert run(*words) == (0, "2 models, no fault: a b\n", "")


def test_every_fault_is_reported_with_its_line_and_exit_code_1(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, "[b]\nmodel = demo:b\nnuma = x\n" + BAD.replace("[b]", "[c]"))
    code, out, err = run("check", path)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f'{path}:6: [a] unknown key "ctx-sise"; did you mean "ctx-size"?',
        f"{path}:7: [c] names no model; add model = a folder or org/name, or hf-repo = org/name",
        f'warning: {path}:3: [b] "numa" has no meaning here; remove it',
        "2 faults",
    ]


def test_check_reports_grammars_and_changes_of_config_json_that_no_load_takes(run: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    path = preset(
        tmp_path,
        f'[a]\nmodel = {folder}\nconfig-override = {{"rope_thetta": 5, "torch_dtype": "float32"}}\n'
        '[c]\nmodel = demo:c\ngrammar = root ::= "a" b\n[d]\nmodel = demo:c\njson-schema = {"type": "strange"}\n'
        f'[e]\nmodel = {folder}\nconfig-override = {{"num_experts": 5}}\n'
        '[f]\nmodel = demo:c\ngrammar = root ::= "a"\n',
    )
    lines = run("check", path, code=1).out.splitlines()
    assert lines[-1] == "3 faults"
    assert lines[:3] == [
        f"{path}:3: [a] config-override: config.json and the architectures of transformers have no member"
        ' "rope_thetta"; did you mean "rope_theta"?',
        f"{path}:6: [c] grammar cannot be compiled: Failed to convert the grammar from GBNF to Lark:"
        " Rule 'b' not found",
        f"{path}:9: [d] json-schema cannot be compiled: Invalid type: strange",
    ]


def test_check_compiles_a_long_chain_of_references_and_refuses_a_grammar_that_no_worker_takes(
    run: Run, tmp_path: Path
) -> None:
    """A chain would overflow the stack of the main thread and end the process."""
    chain = {f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}} for number in range(1500)}
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {"type": "string"}}})
    long = "a" * 2**18
    path = preset(
        tmp_path,
        f'[a]\nmodel = demo:a\njson-schema = {schema}\n[b]\nmodel = demo:b\ngrammar = root ::= "{long}"\n',
    )
    assert run("check", path, code=1).out.splitlines() == [
        f"{path}:6: [b] grammar cannot be compiled: it has 262155 characters; at most 262144 are allowed",
        "1 fault",
    ]


def test_check_reports_rope_keys_that_the_load_would_refuse(run: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    llama3 = write(tmp_path / "n", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    path = preset(
        tmp_path,
        f"[a]\nmodel = {folder}\nrope-scaling = yarn\n[b]\nmodel = {folder}\nyarn-beta-fast = 16\n"
        f"[c]\nmodel = {llama3}\ncompress-pos-emb = 4\n[d]\nmodel = {folder}\nrope-scaling = yarn\nrope-scale = 4\n"
        f"[e]\nmodel = {llama3}\nrope-scale = 1\n",
    )
    assert run("check", path, code=1).out.splitlines() == [
        f"{path}:3: [a] rope-scaling: yarn needs rope-scale, the factor by which the context grows",
        f"{path}:6: [b] yarn-beta-fast: needs rope-scaling = yarn",
        f"{path}:9: [c] rope-scale: the checkpoint has RoPE scaling of the kind llama3, which this cannot be"
        " combined with; remove it, or write other rope_parameters into config-override",
        "3 faults",
    ]


def test_check_reports_files_that_the_load_would_refuse(run: Run, tmp_path: Path) -> None:
    names = ("whole", "short", "lacking", "torn", "mute", "garbled")
    whole, short, lacking, torn, mute, garbled = folders = [write(tmp_path / name) for name in names]
    (mute / "tokenizer_config.json").unlink()
    weights = short / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (lacking / "model.safetensors").rename(lacking / "part-2.safetensors")
    (lacking / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}'
    )
    (torn / "config.json").write_text('{"model_type": ')
    (garbled / "tokenizer.json").write_text('{"model": ')
    sections = "".join(f"[{folder.name}]\nmodel = {folder}\n" for folder in folders)
    path = preset(
        tmp_path,
        f"{sections}[other]\nmodel = {mute}\ntokenizer = {whole}\n"
        f"[long]\nmodel = {whole}\nctx-size = 4097\n"
        f"[longer]\nmodel = {whole}\nctx-size = 4097\nrope-scaling = linear\nrope-scale = 2\n",
    )
    code, out, _ = run("check", path)
    assert (code, out.splitlines()[-1]) == (1, "6 faults")
    *faults, last, unread, long = out.splitlines()[:-1]
    assert [fault.split("]")[0] for fault in faults] == [f"{path}:4: [short", f"{path}:6: [lacking", f"{path}:8: [torn"]
    assert all("fetch" in fault for fault in faults)
    assert last.startswith(f"{path}:10: [mute] {mute} has no file of a tokenizer")
    assert unread.startswith(f"{path}:12: [garbled] {garbled}/tokenizer.json is no valid JSON")
    assert long.startswith(f"{path}:18: [long] ctx-size 4097 is more than the model's maximum of 4096 tokens;")


def test_check_reports_quantization_that_no_load_takes(run: Run, tmp_path: Path) -> None:
    foreign = write(tmp_path / "foreign", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    old = write(tmp_path / "old", compression_config={"quant_method": "sparseml"})
    plain = write(tmp_path / "plain")
    text = f"[a]\nmodel = {foreign}\n[b]\nmodel = {plain}\nquantization = awq\n[c]\nmodel = {plain}\n"
    path = preset(tmp_path, f"{text}quantization = bnb-4bit\n[d]\nmodel = {old}\n")
    out = run("check", path, code=1).out
    first, second, third = (line for line in out.splitlines() if line.startswith(path))
    assert first.startswith(
        f"{path}:2: [a] the checkpoint is quantized with modelopt, which this version cannot load; take"
    )
    assert second == (f"{path}:5: [b] quantization = awq, but the checkpoint is not quantized; leave the key out")
    assert third.startswith(f"{path}:10: [d] the checkpoint is quantized with sparseml, which this version cannot load")


def test_check_warns_of_a_folder_that_no_load_takes_beside_others(run: Run, tmp_path: Path) -> None:
    foreign = write(tmp_path / "store" / "foreign", quantization_config={"quant_method": "exl2"})
    why = "[foreign] the checkpoint is quantized with exl2, which this version cannot load"
    words = ("check", "--models-dir", str(tmp_path / "store"), "--no-models-cache")
    assert run(*words)[0] == 1, "nothing else is served"
    write(tmp_path / "store" / "plain")
    code, out, _ = run(*words)
    warning, last = out.splitlines()
    assert (code, last) == (0, "2 models, no fault: foreign plain")
    assert warning.startswith("warning: ")
    assert why in warning
    assert run(*words, "--strict-presets")[0] == 1
    code, out, _ = run(*words, "--models-preset", preset(tmp_path, f"[named]\nmodel = {foreign}\n"))
    assert code == 1, "a section names it"


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_check_reports_experts_that_are_quantized_one_by_one(run: Run, tmp_path: Path, method: str) -> None:
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    mixture = write(tmp_path / "mixture", quantization_config=quantization)
    dense = write(tmp_path / "dense", quantization_config=quantization)
    for folder, layer in ((mixture, "mlp.experts.0"), (dense, "mlp")):
        write_weights(folder / "model.safetensors", {f"model.layers.0.{layer}.up_proj.qweight": ("I32", [8, 128])})
    own = f"[own]\nmodel = {mixture}\ntrust-remote-code = on\n"
    path = preset(tmp_path, f"[mixture]\nmodel = {mixture}\n[dense]\nmodel = {dense}\n{own}")
    out = run("check", path, code=1).out
    [fault] = [line for line in out.splitlines() if line.startswith(path)]
    assert fault.startswith(f"{path}:2: [mixture] transformers computes the experts of a layer in one tensor")
    assert f"quantized with {method} (model.layers.0.mlp.experts.0.up_proj.qweight); take one that is" in fault


def test_check_takes_the_method_of_quantized_weights_from_an_override_or_quantize_config(
    run: Run, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.qweight": ("I32", [8, 128])})
    text = f"[m]\nmodel = {folder}\n"
    assert "config.json has no quantization_config" in run("check", preset(tmp_path, text))[1]
    override = 'config-override = {"quantization_config": {"quant_method": "gptq", "bits": 4}}\n'
    run("check", preset(tmp_path, text + override), code=0)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    run("check", preset(tmp_path, f"{text}quantization = gptq\n"), code=0)


def test_check_reports_encoders_that_no_load_takes(run: Run, tmp_path: Path) -> None:
    classifies = ["BertForSequenceClassification"]
    write(tmp_path / "one", architectures=classifies, id2label={"0": "score"})
    write(tmp_path / "two", architectures=classifies)
    write(tmp_path / "three", architectures=classifies, id2label={"0": "a", "1": "b", "2": "c"})
    words = write(tmp_path / "words", architectures=["Qwen3ForCausalLM"])
    (words / "modules.json").write_text('[{"type": "sentence_transformers.base.modules.transformer.Transformer"}]')
    (words / "sentence_bert_config.json").write_text('{"transformer_task": "text-generation"}')
    sections = "".join(f"[{name}]\nmodel = {name}\n" for name in ("one", "two", "three", "words"))
    further = "[below]\nmodel = three\ntask = embed\n[asked]\nmodel = words\ntask = rerank\n"
    path = preset(tmp_path, sections + further + "[generates]\nmodel = words\ntask = generate\n")
    code, out, _ = run("check", path)
    two, three, answers, asked, last = out.splitlines()
    assert (code, last) == (1, "4 faults")
    assert two.startswith(f"{path}:4: [two] BertForSequenceClassification has 2 labels; only heads with one label")
    assert three.startswith(f"{path}:6: [three] BertForSequenceClassification has 3 labels; only heads with one label")
    stated = f"{words}/sentence_bert_config.json has transformer_task 'text-generation', which cannot be served"
    assert answers == f"{path}:8: [words] {stated}"
    assert asked.startswith(f"{path}:13: [asked] task = rerank needs a cross-encoder")


@pytest.mark.skipif(importlib.util.find_spec("tiktoken") is not None, reason="tiktoken is installed")
def test_check_warns_of_a_tokenizer_whose_library_is_missing(run: Run, tmp_path: Path) -> None:
    for name, text in (("ranks", b"IQ== 0\nIg== 1\n"), ("pieces", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")):
        (write(tmp_path / name) / "tokenizer.model").write_bytes(text)
    path = preset(tmp_path, "[ranks]\nmodel = ranks\n[pieces]\nmodel = pieces\n")
    code, out, _ = run("check", path)
    warning, last = out.splitlines()
    assert (code, last) == (0, "2 models, no fault: ranks pieces")
    needs = f"{tmp_path}/ranks/tokenizer.model needs the library tiktoken"
    assert warning == f"warning: {path}:2: [ranks] {needs}, which {sys.executable} lacks: pip install tiktoken"


def test_check_reports_a_draft_model_with_other_tokens(run: Run, tmp_path: Path) -> None:
    kinds = {
        "pairs": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]},
        "longer": {"model": {"vocab": {"a": 0, "b": 1, "<s>": 2, "c": 3}}},
        "unigrams": {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["<s>", 0.0]]}},
        "other": {"model": {"vocab": {"b": 0, "a": 1}}},
    }
    for name, content in kinds.items():
        (write(tmp_path / name) / "tokenizer.json").write_text(json.dumps(content))
    write(tmp_path / "unknown")
    drafts = ("longer", "unigrams", "unknown", "other")
    sections = "".join(f"[{draft}]\nmodel = pairs\nmodel-draft = {draft}\n" for draft in drafts)
    path = preset(tmp_path, f"{sections}[own]\nmodel = pairs\nmodel-draft = other\ntokenizer = other\n")
    out = run("check", path, code=1).out
    why = "its tokenizer is another one: token 0 is 'b' and not 'a'; name a draft model of the same family"
    assert out.splitlines() == [f"{path}:12: [other] model-draft = {tmp_path}/other: {why}", "1 fault"]


SHARED = "[exact]\nmodel = demo:a\ntemp = 0\n[alone]\nmodel = demo:a\nctx-size = 512\n[poet]\nmodel = demo:a\n"


def test_check_shows_which_presets_share_a_worker(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, SHARED)
    assert run("check", path) == (0, "one worker for exact poet\n3 models, no fault: exact alone poet\n", "")
    models = run("check", "--json", path, code=0).document["models"]
    shares = {model["id"]: model["shares"] for model in models}
    assert shares == {"exact": ["poet"], "alone": [], "poet": ["exact"]}
    assert run("check", path, "--temp", "1", "--ctx-size", "64")[1].splitlines() == [
        "one worker for exact alone poet", "3 models, no fault: exact alone poet",
    ], "flags win over sections"  # fmt: skip


def test_check_reports_keys_of_placement_that_this_machine_does_not_honour(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = preset(
        tmp_path,
        "[a]\nmodel = demo:a\nrequired-memory = cuda:7=100\ngpu-split = 8\n[b]\nmodel = demo:b\ndevice = cuda:7\n"
        "[c]\nmodel = demo:c\ntensor-split = 3,1\n[d]\nmodel = demo:c\npipeline-parallel = 2\n"
        "[e]\nmodel = demo:c\ntensor-parallel = 2\n"  # two processes
        "[f]\nmodel = demo:c\ndevice = cuda\n[g]\nmodel = demo:c\ndevice = cuda\nn-gpu-layers = 0\n",
    )
    expected = [
        "a: required-memory names cuda:7, and there is no such device here, only cpu",
        "a: gpu-split has no effect on the CPU",
        "b: there is no device cuda:7 here, only cpu; change `device`",
        "c: tensor-split is for 2 accelerators, and there is none that it may use; change it",
        "d: pipeline-parallel is for 2 accelerators, and there is none that it may use; change it",
        "f: device = cuda, and there is no accelerator here, so the CPU computes",
    ]
    lines = run("check", path, code=0).out.splitlines()
    assert lines == [*(f"warning: {each}" for each in expected), "7 models, no fault: a b c d e f g"]
    assert run("check", "--json", path).document["placement_warnings"] == expected


def test_check_without_a_file_reads_the_same_presets_as_serve(run: Run) -> None:
    assert run("check", "--demo")[1].startswith("5 models, no fault: demo-chat ")
    assert run("check", "-m", "org/a", "-hf", "org/b", "--model_path", "demo:c") == (
        0, "3 models, no fault: org/a demo-c org/b\n", ""
    )  # fmt: skip


def test_check_reads_the_very_command_line_that_would_serve(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, GOOD)
    words = ("--port", "0", "--models-memory-margin", "2048", "--no-fork-server")
    assert run("check", path, *words) == (0, "2 models, no fault: a b\n", "")
    assert run(*words, "check", path)[0] == 0
    assert run("check", "serve", "org/name", *words)[:2] == (0, "1 model, no fault: org/name\n")
    assert run("check", "gpt2", "hf.co/org/name", *words)[:2] == (0, "2 models, no fault: gpt2 org/name\n")
    assert run("check", path, "--port", "x")[::2] == (2, '--port: "x" is not a whole number from 0 to 65535\n')


@pytest.mark.parametrize("before", [True, False])
def test_several_names_of_vllm_are_names_of_one_model(run: Run, *, before: bool) -> None:
    names = ["--served-model-name", "a", "b", "c"]
    words = [*names, "--port", "1", "-m", "org/x"] if before else ["org/x", *names]
    code, out, _ = run("check", *words, "--effective")
    assert (code, out.splitlines()[-1]) == (0, "1 model, no fault: a")
    assert re.search("^alias += b,c,org/x ", out, re.MULTILINE)
    code, out, _ = run("check", "--served-model-name", "a", "b", "org/x", "org/y")
    assert (code, out.splitlines()[0][:50]) == (1, "--served-model-name: is for one model, and 2 are n")
    assert run("check", "--served-model-name", "a", "b", "demo:a")[:2] == (0, "1 model, no fault: a\n")


@pytest.mark.parametrize(
    "words",
    [["x=org/a", "y=org/b"], ['{"name": "x", "path": "org/a"}', '{"name": "y", "path": "org/b"}']],
    ids=["pairs", "objects"],
)
def test_several_adapters_of_vllm_are_adapters_of_one_model(run: Run, words: list[str]) -> None:
    code, out, _ = run("check", "--lora-modules", *words, "org/x", "--effective")
    assert code == 0, out
    assert re.search("^lora += x=hub:org/a:main,y=hub:org/b:main", out, re.MULTILINE), out


def test_a_full_disk_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "router", "check"], env=ENVIRON, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"router: No space left on device\n")


def test_a_missing_file_is_a_fault_of_check(run: Run) -> None:
    assert run("check", "gone.ini")[:2] == (1, "gone.ini: no such file or directory\n1 fault\n")


def test_effective_settings_come_with_their_origin_and_without_secrets(run: Run, tmp_path: Path) -> None:
    path = preset(tmp_path, GOOD)
    out = run("--parallel", "2", "check", path, "--effective", "--seed", "7", "--no-pin", code=0).out
    rows = [line.split() for line in out.splitlines()]
    assert ["ctx-size", "=", "512", ";", f"{path}:3"] in rows
    assert ["parallel", "=", "2", ";", "--parallel"] in rows
    assert ["seed", "=", "7", ";", "--seed"] in rows
    assert ["pin", "=", "off", ";", "--no-pin"] in rows
    assert ["dtype", "=", "auto", ";", "built-in"] in rows
    assert "hidden" not in out


def test_check_speaks_json(run: Run, tmp_path: Path) -> None:
    document = run("check", "--json", "--effective", preset(tmp_path, GOOD), code=0).document
    assert (document["schema"], document["problems"]) == (1, [])
    assert [(model["id"], model["aliases"]) for model in document["models"]] == [("a", []), ("b", ["bee"])]
    setting = {"key": "model", "value": "demo:a", "origin": f"{tmp_path}/models.ini:2"}
    assert setting in document["models"][0]["settings"]
    document = run("check", "--json", preset(tmp_path, BAD), code=1).document
    assert document["models"] == []
    assert document["problems"][0] == {
        "file": f"{tmp_path}/models.ini", "line": 3, "section": "a", "key": "ctx-sise",
        "message": 'unknown key "ctx-sise"', "suggestion": "ctx-size",
    }  # fmt: skip
    assert run("check", "--json", "--swap-patience", "x", code=2).document["error"]["code"] == "configuration"


# Help


def test_help_shows_every_option_in_its_group(run: Run) -> None:
    out = run("serve", "--help", code=0).out
    places = [out.index(f"\n{group}:\n") for group in settings.GROUPS]
    assert places == sorted(places)
    shown = " ".join(out.split())
    for option in settings.OPTIONS:
        assert f"--{'[no-]' if option.is_flag else ''}{option.flag}" in shown
        assert all(name in shown for name in option.env)
    assert "tensor-parallel" not in out


def test_the_first_help_is_short_and_says_where_the_rest_is(run: Run) -> None:
    out = run("--help", code=0).out
    assert out.count("\n") < 60
    shown = " ".join(out.split())
    for words in ("router org/name serve a model", "check Read presets", "-m, --model MODEL", "router serve --help"):
        assert words in shown
    assert "..." not in out.partition("Commands:")[2].partition("Options:")[0]


def test_the_help_of_a_command_shows_the_options_that_it_uses(run: Run) -> None:
    check, estimate = (run(command, "--help")[1] for command in ("check", "estimate"))
    assert all(flag in check for flag in ("--models-preset", "--default-model", "--swap-patience"))
    assert not any(flag in check for flag in ("--port", "fork-server", "--state-dir"))
    assert all(flag in estimate for flag in ("--device-limit", "fork-server", "--state-dir"))
    assert not any(flag in estimate for flag in ("--port", "models-watch", "--default-model"))


@pytest.mark.parametrize("command", ["download", "estimate", "prepare"])
def test_commands_for_one_model_accept_swap_patience_but_do_not_show_it(command: str, tmp_path: Path, run: Run) -> None:
    assert "--swap-patience" not in run(command, "--help")[1]
    (tmp_path / "config.json").write_text("{}")
    file = preset(tmp_path, f"[a]\nmodel = {tmp_path}\nmin-residency = 15\n")
    for seconds, is_valid in (("10", False), ("20", True)):
        err = run(command, "--models-preset", file, "--swap-patience", seconds, "a")[2]
        assert ("min-residency must not be more" in err) is not is_valid


def test_help_of_model_keys_shows_every_key(run: Run) -> None:
    out = run("--help-model-keys", code=0).out
    assert all(f"\n  {key.name} " in out for key in presets.KEYS)
    assert max(map(len, out.splitlines())) <= 120


def test_the_version_is_the_packages(run: Run) -> None:
    from router import __version__

    assert run("--version")[:2] == (0, f"router, version {__version__}\n")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("main", ("aiohttp", "pynvml", "torch", "asyncio", "router.memory")), ("estimate", ("aiohttp", "torch", "httpx"))],
)
def test_a_command_imports_only_what_it_needs(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, router.cli.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_interrupted_start_is_reported_in_one_line(tmp_path: Path) -> None:
    """The preset is a pipe without a writer, so the start waits for it until it is interrupted."""
    pipe = tmp_path / "models.ini"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "router", "--models-preset", str(pipe)],
        env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    writer = None
    while writer is None and process.poll() is None:
        with contextlib.suppress(OSError):  # no reader yet
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    process.send_signal(signal.SIGINT)
    assert writer is not None
    os.close(writer)  # a signal just before the read would be looked at only after it
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"", b"router: interrupted")


def test_every_spelling_of_a_key_is_a_flag() -> None:
    known = {name for _, (name, _) in options.MODEL_KEYS.items()}
    assert known == set(preset_keys.BY_SPELLING) - settings.SPELLINGS.keys()
