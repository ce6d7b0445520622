"""A snapshot without its weights: configuration, tokenizer, and what kind of model it is.

Law: no torch here, so that a process may read texts as a model does and be small. Whatever stands in the way is a
StartError that names it and the way out.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from tokenizers import normalizers

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.load import architectures, sentence_transformers_config
from worker.errors import StartError
from worker.protocol import snapshot_files
from worker.protocol.architectures import GENERATES
from worker.protocol.argv import ModelOptions
from worker.protocol.exits import Exit


def load_tokenizer(options: ModelOptions) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of the snapshot, or that of `options.tokenizer`. Raises StartError if there is none."""
    folder = Path(options.tokenizer or options.snapshot)
    try:
        tokenizer: transformers.PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the library's own errors, and whatever code that is not ours raises
        if cuda_errors.is_exhausted(error):
            raise
        why = f"{type(error).__name__}: {cuda_errors.one_line(error)}"
        if not any(_is_vocabulary(file.name) for file in folder.glob("*")):
            why = (
                "none of its files, such as tokenizer.json or tokenizer.model, is there; fetch the snapshot again, or"
                " name the folder of another one: tokenizer = FOLDER"
            )
        raise StartError(f"{folder} has no tokenizer that can be loaded: {why}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(Path(options.snapshot))
    return tokenizer


def _is_vocabulary(name: str) -> bool:
    """Whether a file may be a part of a tokenizer, by its name."""
    parts = ("token", "vocab", "merges", "spiece", "sentencepiece", "tekken", ".model")
    return any(part in name.lower() for part in parts)


def _processor_template(folder: Path) -> str | None:
    """The chat template that older checkpoints of models with images keep beside the tokenizer's files."""
    path = folder / "chat_template.json"
    try:
        stated = json.loads(path.read_bytes()).get("chat_template") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise StartError(
            f"{path} is damaged: {cuda_errors.one_line(error)}; download it again", Exit.DAMAGED
        ) from error
    return stated if isinstance(stated, str) else None


def load_config(options: ModelOptions) -> Any:
    """config.json with `options.config_override` merged in. Raises StartError."""
    folder = Path(options.snapshot)
    path = folder / "config.json"
    if not path.is_file():
        raise StartError(f"{folder} has no config.json; is it a model's snapshot?")
    try:
        stored = json.loads(path.read_bytes(), object_hook=_float)
        if not isinstance(stored, dict):
            raise TypeError("it is no JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise StartError(
            f"{path} is damaged: {cuda_errors.one_line(error)}; download it again", Exit.DAMAGED
        ) from error
    merged = snapshot_files.merged(stored, _override(options.config_override))
    kind = str(merged.get("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        return _remote_config(options, merged, kind)
    if kind == "mistral" and "layer_types" in merged:
        kind = "ministral"  # as transformers' AutoConfig reads such a checkpoint
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(merged)
    except Exception as error:
        raise StartError(f"{path} is not valid for {kind!r}: {cuda_errors.one_line(error)}") from error


def _float(value: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON has no word for as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _remote_config(options: ModelOptions, merged: dict[str, Any], kind: str) -> Any:
    if not merged.get("auto_map"):
        what = f"architecture {kind!r} is unknown to" if kind else "config.json names no model_type, so it is none of"
        raise StartError(
            f"{what} transformers {transformers.__version__}, and config.json names no code of the model's own"
            " (auto_map): take a revision that has its code, and set trust-remote-code = on, or a checkpoint converted"
            " for transformers"
        )
    if not options.trust_remote_code:
        raise StartError(
            f"architecture {kind!r} is code in the snapshot, not part of transformers;"
            " to run that code, set trust-remote-code = on"
        )
    with own_code("its configuration"):
        config = transformers.AutoConfig.from_pretrained(
            options.snapshot, trust_remote_code=True, local_files_only=True
        )
    for key, value in _override(options.config_override).items():
        setattr(config, key, value)
    return config


def settle(tokenizer: transformers.PreTrainedTokenizerBase, snapshot: Path) -> None:
    """Have `tokenizer` read all letters as small ones, if the snapshot's files want that. Raises StartError."""
    if not sentence_transformers_config.lowercases(snapshot):
        return
    if not tokenizer.is_fast:
        raise StartError("sentence_bert_config.json wants do_lower_case, which this kind of tokenizer cannot be told")
    backend = tokenizer.backend_tokenizer
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


@contextmanager
def own_code(what: str, *, runs: bool = True) -> Iterator[None]:
    """A block that runs code of the snapshot, if it `runs` any; `what` of it, for people. Whatever that raises is a
    StartError: it would be raised again."""
    try:
        yield
    except Exception as error:
        if not runs or cuda_errors.is_exhausted(error) or cuda_errors.is_sticky(error):
            raise
        raise StartError(
            f"the snapshot's own code ({what}) does not run with transformers {transformers.__version__}:"
            f" {type(error).__name__}: {cuda_errors.one_line(error)}"
        ) from error


@contextmanager
def native_code(config: Any, *, runs: bool = True) -> Iterator[None]:
    """A block that runs transformers' own code of this architecture, if it `runs` any. What that code finds wrong with
    the config, or with a cache that it does not know, is a StartError: it would be found again."""
    try:
        yield
    except cuda_errors.OF_CODE as error:
        if not runs or not cuda_errors.comes_from(error, "transformers"):
            raise
        raise StartError(
            f"architecture {config.model_type!r} does not run here as config.json describes it:"
            f" {type(error).__name__}: {cuda_errors.one_line(error)}"
        ) from error


def _override(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(f"config-override is no JSON: {error}", Exit.USAGE) from error
    if not isinstance(value, dict):
        raise StartError("config-override wants a JSON object", Exit.USAGE)
    return value


def is_embedder(options: ModelOptions, config: Any) -> bool:
    """Whether the model is to turn text into vectors: `task`, else what the snapshot looks like."""
    if options.task != "auto":
        return options.task == "embed"
    if is_cross_encoder(options, config):
        return False
    names = getattr(config, "architectures", None)
    generates = any(name.endswith(GENERATES) for name in names or ()) or remote_generator(config) is not None
    if not names:
        generates = generates or config.model_type in architectures.VERIFIED
    return sentence_transformers_config.is_layout(Path(options.snapshot)) or not generates


def is_cross_encoder(options: ModelOptions, config: Any) -> bool:
    """Whether the model is to score pairs of texts: `task`, else a classification head with no pooling behind it.

    Raises StartError if it is asked to and has no head, or one of several labels.
    """
    names: list[str] = getattr(config, "architectures", None) or []
    has_head = any(name.endswith("ForSequenceClassification") for name in names)
    if options.task != "rerank" and (options.task != "auto" or not has_head):
        return False
    if not has_head:
        raise StartError(
            "task = rerank wants a cross-encoder (*ForSequenceClassification), and config.json names"
            f" {', '.join(names) or 'no class'}; with task = embed it reranks by the angle between vectors"
        )
    if options.task == "auto" and sentence_transformers_config.has_pooling(Path(options.snapshot)):
        return False
    if config.num_labels != 1:
        raise StartError(
            f"{names[0]} tells {config.num_labels} labels apart; only heads of one label, a score, can be served"
            " (task = embed serves the model below the head)"
        )
    return True


def own_classes(config: Any) -> Mapping[str, Any]:
    """The classes of the snapshot's own code, by what they stand for; none if config.json names none."""
    mapped = getattr(config, "auto_map", None)
    return mapped if isinstance(mapped, dict) else {}


def remote_generator(config: Any) -> str | None:
    """Where the snapshot's own code has a class that generates, if it has one."""
    mapped = own_classes(config)
    found = mapped.get("AutoModelForCausalLM") or mapped.get("AutoModelForSeq2SeqLM")
    return str(found) if found else None
