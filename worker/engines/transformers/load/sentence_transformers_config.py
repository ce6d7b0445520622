"""Configuration of embedders and rerankers in the layout of sentence-transformers, as values.

`modules.json` lists the modules behind the transformer, each with its own folder. `sentence_bert_config.json` and
`config_sentence_transformers.json` describe the input. A module, mode or setting that the engine does not support is a
StartError: vectors that differ from the author's are worse than none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from worker.errors import StartError
from worker.protocol.argv import POOLINGS
from worker.protocol.events import Exit
from worker.protocol.snapshot_files import is_below

MODULES, TRANSFORMER = "modules.json", "sentence_bert_config.json"
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "last")  # in order of concatenation
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_Json = TypeVar("_Json", dict[str, Any], list[Any])
_VECTOR = "sentence_embedding"  # name of the vector that modules pass on


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a text's hidden states to one vector. Several modes are concatenated."""

    modes: tuple[str, ...]
    skips_prompt: bool = False  # tokens of the instruction before a text are excluded


@dataclass(frozen=True, slots=True)
class Dense:
    """Linear layer and activation on the vector."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "torch.nn.modules.activation.Tanh"
    residual: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorm:
    folder: Path
    size: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scale to Euclidean length 1."""


EmbedderModule = Pooling | Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderConfig:
    """Conversion of texts to vectors."""

    steps: tuple[EmbedderModule, ...] = (Pooling(("mean",)),)  # applied in this order; empty: one vector for each token
    prompts: Mapping[str, str] = field(default_factory=dict)  # instructions before a text, by name
    default_prompt: str = ""  # text of the instruction used if none is named
    dimensions: int = 0  # leading components that are kept; 0: all


def is_layout(snapshot: Path) -> bool:
    """True if the snapshot has the layout of sentence-transformers."""
    return (snapshot / MODULES).is_file()


def has_pooling(snapshot: Path) -> bool:
    """True if that layout includes pooling."""
    return any(str(module.get("type", "")).endswith(".Pooling") for module in read_json(snapshot / MODULES, list))


def read(snapshot: Path, asked: str = "") -> EmbedderConfig:
    """Read an embedder's configuration; mean pooling if there is none. `asked`: a pooling mode that replaces it.

    A final Normalize is dropped: the option `embd_normalize` decides about normalization. Raises StartError.
    """
    if asked and asked not in POOLINGS:
        raise StartError(f"pooling {asked!r} is none of {', '.join(POOLINGS)}", Exit.USAGE)
    if asked == "rank":
        raise StartError("pooling = rank needs a cross-encoder (*ForSequenceClassification); leave it out to embed")
    _check_transformer(snapshot / TRANSFORMER, read_json(snapshot / TRANSFORMER), "feature-extraction")
    settings = read_json(snapshot / "config_sentence_transformers.json")
    prompts, default = read_prompts(snapshot, settings)
    steps = _steps(snapshot) if is_layout(snapshot) else EmbedderConfig().steps
    if asked == "none":
        steps = ()
    elif asked:
        steps = tuple(replace(step, modes=(asked,)) if isinstance(step, Pooling) else step for step in steps)
    if steps and isinstance(steps[-1], Normalize):
        steps = steps[:-1]
    return EmbedderConfig(
        steps=steps,
        prompts=prompts,
        default_prompt=default,
        dimensions=int(settings.get("truncate_dim") or 0),
    )


def read_prompts(snapshot: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Prompts by name, and the text of the default prompt. `query` and `document` always exist, perhaps empty."""
    stated = settings.get("prompts") or {}
    path = snapshot / "config_sentence_transformers.json"
    if not isinstance(stated, dict) or not all(isinstance(text, str | None) for text in stated.values()):
        raise StartError(f"{path} is damaged: its prompts are not texts by name", Exit.DAMAGED)
    prompts = {"query": "", "document": "", **{str(name): text or "" for name, text in stated.items()}}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise StartError(f"{path} names the default prompt {default!r}, and has {', '.join(sorted(prompts))}")
    return prompts, prompts[default] if default is not None else ""


def lowercases(snapshot: Path) -> bool:
    """True if texts are lower-cased regardless of the tokenizer's own settings."""
    return bool(read_json(snapshot / TRANSFORMER).get("do_lower_case"))


def max_tokens(snapshot: Path) -> int:
    """Maximum of tokens of a text in sentence-transformers: its own setting, else the tokenizer's; 0 if neither is
    set."""
    stated = int(read_json(snapshot / TRANSFORMER).get("max_seq_length") or 0)
    usual = read_json(snapshot / "tokenizer_config.json").get("model_max_length")
    return stated or (int(usual) if isinstance(usual, int | float) and 0 < usual < 1 << 31 else 0)


def activation_of_scores(snapshot: Path, config: Any) -> str:
    """Dotted path of the activation for a cross-encoder's score; empty if none is configured.

    Raises StartError for modules behind the classification head or a prompt, which are not supported.
    """
    for module, kind in _modules(snapshot):
        if kind != "Transformer" or module.get("path"):
            raise StartError(f"{snapshot / MODULES} has a module {kind!r} behind the model, which cannot be applied")
    _check_transformer(
        snapshot / TRANSFORMER, read_json(snapshot / TRANSFORMER), "sequence-classification", "feature-extraction"
    )
    settings = read_json(snapshot / "config_sentence_transformers.json")
    if read_prompts(snapshot, settings)[1]:
        raise StartError(f"{snapshot} puts a prompt before each query, which cannot be applied to a cross-encoder yet")
    nested = getattr(config, "sentence_transformers", None)
    found = (
        settings.get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or getattr(config, "sbert_ce_default_activation_function", None)
    )
    return str(found or "")


def _check_transformer(path: Path, config: Mapping[str, Any], *tasks: str) -> None:
    """Raise StartError for settings that use other input than a text's tokens or another output."""
    if config.get("transformer_task", tasks[0]) not in tasks:
        raise StartError(f"{path} has transformer_task {config['transformer_task']!r}, which cannot be served")
    modalities = config.get("modality_config") or {}
    if "message" in modalities or (modalities and "text" not in modalities):
        raise StartError(f"{path} takes {', '.join(modalities)}; only embedders of plain text can be served")
    output = (modalities.get("text") or {}).get("method_output_name", "last_hidden_state")
    if tasks[0] == "feature-extraction" and output not in ("last_hidden_state", None):
        raise StartError(f"{path} embeds by {output!r}; only last_hidden_state can be served")


def _modules(snapshot: Path) -> list[tuple[dict[str, Any], str]]:
    """Entries of modules.json with their kinds. Raises StartError for modules outside of sentence-transformers."""
    found = []
    for module in read_json(snapshot / MODULES, list):
        if not isinstance(module, dict):
            raise StartError(f"{snapshot / MODULES} is damaged: {module!r} is not a module", Exit.DAMAGED)
        if not is_below(str(module.get("path") or "")):
            raise StartError(f"{snapshot / MODULES} names {module['path']!r}, which is no folder below it")
        package, _, kind = str(module.get("type", "")).rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise StartError(f"{snapshot / MODULES} has a module {module.get('type')!r}: code that cannot be applied")
        found.append((module, kind))
    return found


def _steps(snapshot: Path) -> tuple[EmbedderModule, ...]:
    steps: list[EmbedderModule] = []
    for module, kind in _modules(snapshot):
        if kind == "Transformer":
            if module.get("path"):
                raise StartError(
                    f"{snapshot / MODULES} keeps the model in {module['path']!r}; a newer sentence-transformers writes"
                    " it beside modules.json when it saves the model again"
                )
        elif kind != "Dropout":  # which does nothing but in training
            steps.append(_step(snapshot, snapshot / str(module.get("path", "")), kind))
    if not steps or not isinstance(steps[0], Pooling) or sum(isinstance(step, Pooling) for step in steps) > 1:
        raise StartError(f"{snapshot / MODULES} has no Pooling behind the model, or further ones behind it")
    return tuple(steps)


def _step(snapshot: Path, folder: Path, kind: str) -> EmbedderModule:
    path = folder / "config.json"
    config = read_json(path)
    if kind == "Pooling":
        return Pooling(_modes(path, config), skips_prompt=config.get("include_prompt") is False)
    ends = {config.get("module_input_name") or _VECTOR, config.get("module_output_name") or _VECTOR}
    if kind in ("Dense", "Normalize") and ends != {_VECTOR}:
        raise StartError(f"{path} works on {', '.join(sorted(ends - {_VECTOR}))}, not on a text's vector")
    if kind == "Normalize":
        return Normalize()
    try:
        if kind == "LayerNorm":
            return LayerNorm(folder, int(config["dimension"]))
        if kind == "Dense":
            stated = {"activation": str(config["activation_function"])} if "activation_function" in config else {}
            return Dense(
                folder,
                int(config["in_features"]),
                int(config["out_features"]),
                bias=bool(config.get("bias", True)),
                residual=bool(config.get("use_residual")),
                **stated,
            )
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {type(error).__name__}: {error}", Exit.DAMAGED) from error
    raise StartError(f"{snapshot / MODULES} has a module {kind!r}, which this version cannot apply")


def _modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Pooling modes by `pooling_mode`, else by the flags of older versions, else mean."""
    settings = config.get("pooling_mode")
    if settings is None:
        flagged = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
        return tuple(flagged or ["mean"])
    modes = tuple(
        "last" if mode == "lasttoken" else str(mode) for mode in ([settings] if isinstance(settings, str) else settings)
    )
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise StartError(f"{path} asks for pooling by {', '.join(unknown) or 'nothing'}; known are {', '.join(MODES)}")
    return modes


def read_json(path: Path, kind: type[_Json] = dict) -> _Json:  # type: ignore[assignment]
    """The JSON object (or list) in `path`; empty without such a file. Raises StartError if it is damaged."""
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is damaged: {error}", Exit.DAMAGED) from error
    if not isinstance(value, kind):
        raise StartError(f"{path} is damaged: it holds no {kind.__name__}", Exit.DAMAGED)
    return value
