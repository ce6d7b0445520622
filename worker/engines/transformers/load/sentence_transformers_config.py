"""What a snapshot's own files say of vectors and scores, as values: the layout of sentence-transformers.

`modules.json` lists what follows the transformer, each module with a folder of its own; `sentence_bert_config.json` and
`config_sentence_transformers.json` say how texts come in. A module, a mode or a setting that the engine cannot apply is
a StartError that names it: vectors that differ from the author's are worse than none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.errors import StartError
from worker.protocol.exits import Exit
from worker.protocol.snapshot_files import is_below

MODULES, TRANSFORMER = "modules.json", "sentence_bert_config.json"
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "last")
"""In the order in which several of them are concatenated."""
ASKED = ("none", "mean", "cls", "last", "rank")
"""What a preset may ask for."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_VECTOR = "sentence_embedding"
"""What sentence-transformers calls the vector that modules hand on."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Hidden states of a text to one vector; several modes are concatenated."""

    modes: tuple[str, ...]
    skips_prompt: bool = False
    """The tokens of the instruction before a text do not count."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer and an activation on the vector."""

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
    """To Euclidean length 1."""


Step = Pooling | Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How texts become vectors."""

    steps: tuple[Step, ...] = (Pooling(("mean",)),)
    """What follows the transformer, in this order; none: a vector for each token."""
    max_tokens: int = 0
    """Of one text; 0: the files do not say."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Instructions that may stand before a text, by name."""
    default_prompt: str = ""
    """The text of the one that stands there where none is named."""
    dimensions: int = 0
    """Leading components that are kept; 0: all."""


def is_layout(snapshot: Path) -> bool:
    """Whether the snapshot has the layout of sentence-transformers."""
    return (snapshot / MODULES).is_file()


def has_pooling(snapshot: Path) -> bool:
    """Whether that layout makes vectors of texts."""
    return any(str(module.get("type", "")).endswith(".Pooling") for module in read_list(snapshot / MODULES))


def read(snapshot: Path, asked: str = "") -> Layout:
    """The layout of an embedder; without one mean pooling. `asked`: a pooling that replaces the snapshot's.

    A last Normalize is left out: the option `embd_normalize` says whether vectors get length 1. Raises StartError.
    """
    if asked and asked not in ASKED:
        raise StartError(f"pooling {asked!r} is none of {', '.join(ASKED)}", Exit.USAGE)
    if asked == "rank":
        raise StartError("pooling = rank wants a cross-encoder (*ForSequenceClassification); leave it out to embed")
    _check_transformer(snapshot / TRANSFORMER, read_json(snapshot / TRANSFORMER), "feature-extraction")
    said = read_json(snapshot / "config_sentence_transformers.json")
    prompts, default = read_prompts(snapshot, said)
    steps = _steps(snapshot) if is_layout(snapshot) else Layout().steps
    if asked == "none":
        steps = ()
    elif asked:
        steps = tuple(replace(step, modes=(asked,)) if isinstance(step, Pooling) else step for step in steps)
    if steps and isinstance(steps[-1], Normalize):
        steps = steps[:-1]
    return Layout(
        steps=steps,
        max_tokens=max_tokens(snapshot),
        prompts=prompts,
        default_prompt=default,
        dimensions=int(said.get("truncate_dim") or 0),
    )


def read_prompts(snapshot: Path, said: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Prompts by name, and the text of the default one. `query` and `document` are always there, perhaps empty."""
    stated = said.get("prompts") or {}
    path = snapshot / "config_sentence_transformers.json"
    if not isinstance(stated, dict) or not all(isinstance(text, str | None) for text in stated.values()):
        raise StartError(f"{path} is damaged: its prompts are no texts by name", Exit.DAMAGED)
    prompts = {"query": "", "document": "", **{str(name): text or "" for name, text in stated.items()}}
    default = said.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise StartError(f"{path} names the default prompt {default!r}, and has {', '.join(sorted(prompts))}")
    return prompts, prompts[default] if default is not None else ""


def lowercases(snapshot: Path) -> bool:
    """Whether texts are read in small letters, whatever the tokenizer itself would do."""
    return bool(read_json(snapshot / TRANSFORMER).get("do_lower_case"))


def max_tokens(snapshot: Path) -> int:
    """Tokens of one text, as sentence-transformers would cut it: its own setting, else the tokenizer's; 0: neither
    says."""
    stated = int(read_json(snapshot / TRANSFORMER).get("max_seq_length") or 0)
    usual = read_json(snapshot / "tokenizer_config.json").get("model_max_length")
    return stated or (int(usual) if isinstance(usual, int | float) and 0 < usual < 1 << 31 else 0)


def activation_of_scores(snapshot: Path, config: Any) -> str:
    """The activation that a cross-encoder's files name for its score, as a dotted path; empty: none is named.

    Raises StartError for modules behind the classification head, or a prompt before it, which nothing here applies.
    """
    for module, kind in _modules(snapshot):
        if kind != "Transformer" or module.get("path"):
            raise StartError(f"{snapshot / MODULES} has a module {kind!r} behind the model, which cannot be applied")
    _check_transformer(
        snapshot / TRANSFORMER, read_json(snapshot / TRANSFORMER), "sequence-classification", "feature-extraction"
    )
    said = read_json(snapshot / "config_sentence_transformers.json")
    if read_prompts(snapshot, said)[1]:
        raise StartError(f"{snapshot} puts a prompt before each query, which cannot be applied to a cross-encoder yet")
    nested = getattr(config, "sentence_transformers", None)
    found = (
        said.get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or getattr(config, "sbert_ce_default_activation_function", None)
    )
    return str(found or "")


def _check_transformer(path: Path, config: Mapping[str, Any], *tasks: str) -> None:
    """Raise StartError for settings that make something else of a text than its tokens."""
    if config.get("transformer_task", tasks[0]) not in tasks:
        raise StartError(f"{path} wants transformer_task {config['transformer_task']!r}, which cannot be served")
    modalities = config.get("modality_config") or {}
    if "message" in modalities or (modalities and "text" not in modalities):
        raise StartError(f"{path} takes {', '.join(modalities)}; only embedders of plain text can be served")
    output = (modalities.get("text") or {}).get("method_output_name", "last_hidden_state")
    if tasks[0] == "feature-extraction" and output not in ("last_hidden_state", None):
        raise StartError(f"{path} embeds by {output!r}; only last_hidden_state can be served")


def _modules(snapshot: Path) -> list[tuple[dict[str, Any], str]]:
    """The entries of modules.json with their kinds; raises StartError for code that is not sentence-transformers'."""
    found = []
    for module in read_list(snapshot / MODULES):
        if not isinstance(module, dict):
            raise StartError(f"{snapshot / MODULES} is damaged: {module!r} is no module", Exit.DAMAGED)
        if not is_below(str(module.get("path") or "")):
            raise StartError(f"{snapshot / MODULES} names {module['path']!r}, which is no folder below it")
        package, _, kind = str(module.get("type", "")).rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise StartError(f"{snapshot / MODULES} has a module {module.get('type')!r}: code that cannot be applied")
        found.append((module, kind))
    return found


def _steps(snapshot: Path) -> tuple[Step, ...]:
    steps: list[Step] = []
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


def _step(snapshot: Path, folder: Path, kind: str) -> Step:
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
    """As `pooling_mode` says, one or several; else by the flags of older versions; else mean."""
    said = config.get("pooling_mode")
    if said is None:
        flagged = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
        return tuple(flagged or ["mean"])
    modes = tuple("last" if mode == "lasttoken" else str(mode) for mode in ([said] if isinstance(said, str) else said))
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise StartError(f"{path} asks for pooling by {', '.join(unknown) or 'nothing'}; known are {', '.join(MODES)}")
    return modes


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty without such a file. Raises StartError if it is damaged."""
    value = _read(path, {})
    return value if isinstance(value, dict) else {}


def read_list(path: Path) -> list[Any]:
    value = _read(path, [])
    return value if isinstance(value, list) else []


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is damaged: {error}", Exit.DAMAGED) from error
    if not isinstance(value, type(default)):
        raise StartError(f"{path} is damaged: it holds no {type(default).__name__}", Exit.DAMAGED)
    return value
