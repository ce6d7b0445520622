"""The result of `router check`: problems, warnings, and with --effective all settings of all models."""

import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from router.cli.estimate_report import count_of
from router.config.effective import effective as effective_settings
from router.config.ini import Problem
from router.config.option_types import nearest
from router.config.presets import HUB, Preset
from router.config.resolve import LoadedPresets
from router.memory import checkpoint
from router.memory.checkpoint_facts import (
    Checkpoint,
    ContextTooLarge,
    UnknownArchitecture,
    UnknownCheckpoint,
    WrongQuantization,
    effective_ctx,
    quantization,
)
from router.memory.segments import check_quantization
from router.registry import worker_groups
from router.store.catalogue import find_snapshot
from worker.protocol.architectures import EXPERTS_ALONE, LIBRARIES, experts_fault, scoring_fault
from worker.protocol.memory import COMPILER_STACK_BYTES, MAX_GRAMMAR_LENGTH
from worker.protocol.model_config import ROPE_NAMES, apply_rope, merge, with_quantization
from worker.protocol.snapshot_files import is_of_tokenizer, quantization_beside
from worker.protocol.vocabulary import vocabulary_fault


def with_load_faults(loaded: LoadedPresets, cache: str, *, strict: bool) -> LoadedPresets:
    """Return `loaded` with the problems of `load_faults`.

    Files that no load takes, of a model that only a folder lists, are a warning: the others are served. They are a
    fault if there are no others, or if `strict`.
    """
    faults = tuple(load_faults(loaded, cache))
    unusable = [
        fault
        for fault in faults
        if fault.key in ("model", "hf-repo") and loaded.presets[fault.section].source != "preset"
    ]
    if strict or loaded.presets.keys() == {fault.section for fault in unusable}:
        unusable = []
    problems = (fault for fault in faults if fault not in unusable)
    return replace(loaded, problems=(*loaded.problems, *problems), warnings=(*loaded.warnings, *unusable))


def load_faults(loaded: LoadedPresets, cache: str) -> Iterator[Problem]:
    """Yield the faults for which the load of each model would fail, as far as they show without torch.

    They are grammars that cannot be compiled; unknown members of `config-override` and RoPE keys that config.json does
    not allow; a draft model with other tokens; of a folder damaged or missing files (also of the tokenizer) and a
    `ctx-size` above the model's maximum; of a snapshot in the hub cache, which a download completes, only pickled
    weights that cannot be converted; a quantization that is not supported, or another one than the preset states; an
    embedder or a cross-encoder of a kind that is not served.

    `cache`: folder of the hub cache. This takes a while, so a start and a reload of the router leave it out.
    """
    for preset in loaded.presets.values():
        yield from _draft_fault(preset, cache)
        for key in preset.sampling.keys() & {"grammar", "json-schema"}:
            if why := _grammar_fault(preset.sampling[key], is_schema=key == "json-schema"):
                yield _problem(preset, key, f"{key} cannot be compiled: {why}")
        folder = _folder_of_model(preset, cache)
        if folder is None:
            continue
        try:
            if preset.path:
                needs_weights = preset.load_format != "dummy"
                facts = checkpoint.read(
                    Path(folder), override=preset.config_override, needs_weights=needs_weights, task=preset.task
                )
                if not (preset.config_override or preset.rope):  # which change the model's maximum
                    effective_ctx(facts, preset)
                if not preset.tokenizer and not any(map(is_of_tokenizer, os.listdir(folder))):
                    message = f"{folder} has no file of a tokenizer, such as tokenizer.json; write tokenizer = FOLDER"
                    yield _problem(preset, "model", message)
                checkpoint.read_json(Path(preset.tokenizer or folder) / "tokenizer.json")  # raises if it is damaged
            elif checkpoint.has_only_pickles(folder):
                checkpoint.check_pickles(Path(folder))
        except (ContextTooLarge, UnknownArchitecture) as error:
            yield _problem(preset, "ctx-size", error.message.removeprefix(f"{preset.id}: "))
        except UnknownCheckpoint as error:
            yield _problem(preset, "model" if preset.path else "hf-repo", error.message)
        if not preset.config_override:  # which may state another method
            yield from _quantization_fault(preset, folder)
            yield from _encoder_fault(preset, Path(folder))
        if (preset.config_override or preset.rope) and (stored := checkpoint.json_object(Path(folder) / "config.json")):
            yield from _unknown_members(preset, stored)
            yield from _rope_faults(preset, stored)


def lacking_libraries(loaded: LoadedPresets, cache: str) -> Iterator[Problem]:
    """Yield a warning for each model whose quantization or tokenizer needs a library that this interpreter lacks.
    Presets with an interpreter of their own are skipped."""
    for preset in loaded.presets.values():
        folder = _folder_of_model(preset, cache)
        method, *_ = _quantization(folder) if folder else ("",)
        method = method or preset.quantization
        library, command = LIBRARIES.get("bitsandbytes" if method.startswith("bnb-") else method, ("", ""))
        if library and not preset.python and importlib.util.find_spec(library) is None:
            message = f"quantization with {method} needs the library {library}, which {sys.executable} lacks: {command}"
            yield _problem(preset, "quantization" if "quantization" in preset.origins else "model", message)
        tokenizer = preset.tokenizer or folder
        has_tiktoken = preset.python or importlib.util.find_spec("tiktoken") is not None
        if tokenizer and not has_tiktoken and _is_of_tiktoken(Path(tokenizer)):
            message = f"{tokenizer}/tokenizer.model needs the library tiktoken, which {sys.executable} lacks"
            yield _problem(preset, "tokenizer" if preset.tokenizer else "model", f"{message}: pip install tiktoken")


def _is_of_tiktoken(folder: Path) -> bool:
    """True if a folder has no tokenizer.json, and a tokenizer.model with lines of tiktoken: base64 and a number."""
    try:
        with (folder / "tokenizer.model").open("rb") as file:
            first = file.readline(1000)
    except OSError:
        return False
    has_other = (folder / "tokenizer.json").is_file()
    return not has_other and re.fullmatch(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n", first) is not None


def _problem(preset: Preset, key: str, message: str, suggestion: str = "") -> Problem:
    return Problem(preset.origins.get(key, ""), 0, preset.id, key, message, suggestion)


def _folder_of_model(preset: Preset, cache: str) -> str | None:
    """Return the folder of the model's files; None if they are not on this machine."""
    return preset.path or (find_snapshot(preset.repo, preset.revision, cache) if preset.repo else None)


def _draft_fault(preset: Preset, cache: str) -> Iterator[Problem]:
    """Yield a problem if the draft model has other tokens than the model, and both have a tokenizer.json here."""
    if not preset.drafts_by_model:
        return
    repo, _, revision = preset.model_draft.removeprefix(HUB).partition(":")
    draft = find_snapshot(repo, revision, cache) if preset.model_draft.startswith(HUB) else preset.model_draft
    ours, theirs = (_vocabulary(folder) for folder in (preset.tokenizer or _folder_of_model(preset, cache), draft))
    if ours and theirs and (why := vocabulary_fault(ours, theirs)):
        yield _problem(preset, "model-draft", f"model-draft = {draft}: {why}")


def _vocabulary(folder: str | None) -> dict[int, str]:
    """Return the tokens in a tokenizer.json by number; empty if there is none, or it has another form."""
    content = checkpoint.json_object(Path(folder) / "tokenizer.json") if folder else {}
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {number: token for token, number in vocabulary.items()}
        else:  # unigrams, with their scores
            tokens = {number: token for number, (token, _) in enumerate(vocabulary)}
        return tokens | {added["id"]: added["content"] for added in content.get("added_tokens", ())}
    except (KeyError, TypeError, ValueError):
        return {}


def _grammar_fault(text: str, *, is_schema: bool) -> str:
    """Return the reason why the worker cannot compile a grammar; empty if it can, or lacks the library."""
    try:
        from llguidance import LLMatcher, grammar_from  # late: a base installation lacks it
    except ImportError:
        return ""
    if len(text) > MAX_GRAMMAR_LENGTH:
        return f"it has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed"

    def compiled() -> str:
        try:
            source = LLMatcher.grammar_from_json_schema(text) if is_schema else grammar_from("gbnf", text)
            return LLMatcher.validate_grammar(source)
        except ValueError as error:
            return str(error)

    before = threading.stack_size(COMPILER_STACK_BYTES)  # of the threads that start from now on
    try:
        with ThreadPoolExecutor(1) as executor:
            return " ".join(executor.submit(compiled).result().split())
    finally:
        threading.stack_size(before)


def _quantization(folder: str) -> tuple[str, int, int]:
    """Return the method in the files of a model, as `checkpoint_facts.quantization`."""
    config = checkpoint.json_object(Path(folder) / "config.json")
    return quantization(with_quantization(config, quantization_beside(Path(folder))))


def _quantization_fault(preset: Preset, folder: str) -> Iterator[Problem]:
    """Yield a problem if the method of the checkpoint is not supported, is another one than the preset states, or has
    quantized each expert of a mixture alone."""
    method, bits, group = _quantization(folder)
    try:
        check_quantization(Checkpoint(quantization=method, bits=bits, group=group), preset, on_host=False)
    except WrongQuantization as error:
        key = "quantization" if "quantization" in preset.origins else "model" if preset.path else "hf-repo"
        yield _problem(preset, key, error.message.removeprefix(f"{preset.id}: "))
    if method not in EXPERTS_ALONE or preset.trust_remote_code:  # code of the snapshot may compute each expert alone
        return
    try:
        packed = [name for name in checkpoint.tensor_names(Path(folder)) if name.endswith(".qweight")]
    except UnknownCheckpoint:
        return  # another fault of the load, or a snapshot that a download completes
    if why := experts_fault(method, packed):
        yield _problem(preset, "model" if preset.path else "hf-repo", why)


def _encoder_fault(preset: Preset, folder: Path) -> Iterator[Problem]:
    """Yield a problem if a model that embeds or scores texts does so in a way that no load serves."""
    config, transformer = checkpoint.json_object(folder / "config.json"), folder / "sentence_bert_config.json"
    task = checkpoint.json_object(transformer).get("transformer_task", "feature-extraction")
    try:
        can = checkpoint.offered(Checkpoint(capabilities=checkpoint.capabilities(folder, config)), preset)
        labels = len(config.get("id2label") or ()) or config.get("num_labels") or 2  # as transformers counts them
        why = scoring_fault(config.get("architectures") or (), labels) if can == ["rerank"] else ""
    except (UnknownCheckpoint, AttributeError, TypeError):
        return  # another fault of the load
    if "rerank" in can and not why and task not in ("feature-extraction", "sequence-classification"):
        why = f"{transformer} has transformer_task {task!r}, which cannot be served"
    # Code of the snapshot may count labels in another way.
    if why and preset.task != "generate" and not preset.trust_remote_code:
        yield _problem(preset, "model" if preset.path else "hf-repo", why)


def _rope_faults(preset: Preset, stored: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if a RoPE key lacks a key that belongs to it, or contradicts config.json."""
    try:
        config = merge(stored, json.loads(preset.config_override or "{}"))
        apply_rope(config, preset.rope)
    except ValueError as error:
        yield _problem(preset, str(error).partition(":")[0], str(error))
    except (ArithmeticError, AttributeError, TypeError):
        return  # config.json describes no RoPE: another fault of the load


def _unknown_members(preset: Preset, stored: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each member of `config-override` that neither config.json nor any configuration of the
    installed transformers mentions. The load accepts members of the model's own configuration only."""
    package = importlib.util.find_spec("transformers")  # finds it without importing it, and so torch
    if preset.python or preset.trust_remote_code or package is None:
        return
    unknown = json.loads(preset.config_override or "{}").keys() - stored.keys() - ROPE_NAMES
    if not unknown:
        return
    for root in map(Path, package.submodule_search_locations or ()):
        for file in (root / "configuration_utils.py", *root.glob("models/*/configuration_*.py")):
            unknown -= set(re.findall(r"\w+", file.read_text("utf-8")))
    for name in sorted(unknown):
        message = f'config-override: config.json and the architectures of transformers have no member "{name}"'
        yield _problem(preset, "config-override", message, nearest(name, {*stored, *ROPE_NAMES}))


def text(loaded: LoadedPresets, *, effective: bool) -> str:
    """The result for a terminal."""
    lines = [str(problem) for problem in loaded.problems]
    lines += [f"warning: {warning}" for warning in loaded.warnings]
    if effective:
        for id, preset in loaded.presets.items():
            rows = [(key, _short(value), origin) for key, value, origin in effective_settings(preset)]
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            lines += ["", f"[{id}]", *(f"{key:{widths[0]}} = {value:{widths[1]}}  ; {at}" for key, value, at in rows)]
        lines.append("")
    lines += [
        f"one worker for {' '.join(group)}" for group in worker_groups.group_presets(loaded.presets) if len(group) > 1
    ]
    if loaded.problems:
        lines.append(count_of(len(loaded.problems), "fault"))
    else:
        count = f"{count_of(len(loaded.presets), 'model')}, no fault"
        lines.append(f"{count}: {' '.join(loaded.presets)}" if loaded.presets else count)
    return "\n".join(lines)


def document(loaded: LoadedPresets, *, effective: bool) -> dict[str, Any]:
    """The result as a JSON document."""
    models: list[dict[str, Any]] = []
    groups = {id: group for group in worker_groups.group_presets(loaded.presets) for id in group}
    for id, preset in loaded.presets.items():
        model: dict[str, Any] = {"id": id, "source": preset.source, "aliases": list(preset.aliases)}
        model["shares"] = [other for other in groups[id] if other != id]
        if effective:
            rows = effective_settings(preset)
            model["settings"] = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        models.append(model)
    return {
        "problems": [asdict(problem) for problem in loaded.problems],
        "warnings": [asdict(warning) for warning in loaded.warnings],
        "models": models,
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
