"""A snapshot without its weights: configuration, tokenizer, kind and class of the model.

Does not import torch, so that a process that only tokenizes stays small. Whatever prevents a load is a StartError with
the remedy.
"""

import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from tokenizers import normalizers, processors
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.load import sentence_transformers_config
from worker.errors import StartError
from worker.protocol import model_config, tekken
from worker.protocol.architectures import GENERATES, VERIFIED, VISION, scoring_fault
from worker.protocol.argv import ModelOptions
from worker.protocol.events import Exit
from worker.protocol.snapshot_files import is_of_tokenizer, quantization_beside


def load_tokenizer(options: ModelOptions) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of the snapshot, or of `options.tokenizer`. Raises StartError if there is none."""
    folder = Path(options.tokenizer or options.snapshot)
    try:
        tokenizer: transformers.PreTrainedTokenizerBase
        if tekken.is_alone(folder):
            tokenizer = _from_tekken(folder)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=options.trust_remote_code, local_files_only=True, mistral_format=False
            )
    except Exception as error:  # errors of the library, or of the snapshot's own code
        if cuda_errors.is_exhausted(error):
            raise
        why = f"{type(error).__name__}: {cuda_errors.one_line(error)}"
        if not options.trust_remote_code and "trust_remote_code" in str(error):
            why = "it is code in the snapshot; to run that code, set trust-remote-code = on"
        if not any(is_of_tokenizer(file.name) for file in folder.glob("*")):
            why = (
                "none of its files, such as tokenizer.json or tokenizer.model, is there; fetch the snapshot again, or"
                " name the folder of another one: tokenizer = FOLDER"
            )
        raise StartError(f"{folder} has no tokenizer that can be loaded: {why}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(Path(options.snapshot))
    return tokenizer


def _from_tekken(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """Load Mistral's tekken.json. Texts begin with `<s>`, as with tokenizer.json and with mistral-common."""
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer  # late: few models need it

    template = None
    if not (folder / "chat_template.jinja").is_file():  # which takes precedence over the one that is given
        template = sentence_transformers_config.read_json(folder / "tokenizer_config.json").get("chat_template")
        template = template or _processor_template(folder) or tekken.chat_template(folder)
    tokenizer = convert_tekken_tokenizer(str(folder / tekken.TEKKEN), template)
    first = str(tokenizer.bos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """Chat template of older vision-language checkpoints, which is in a file beside the tokenizer's."""
    path = folder / "chat_template.json"
    try:
        stated = json.loads(path.read_bytes()).get("chat_template") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise StartError(
            f"{path} is damaged: {cuda_errors.one_line(error)}; download it again", Exit.DAMAGED
        ) from error
    return stated if isinstance(stated, str) else None


def load_config(options: ModelOptions) -> Any:
    """Load config.json with `options.config_override` merged in and the keys of `options.rope` applied. Raises
    StartError."""
    folder = Path(options.snapshot)
    path = folder / "config.json"
    if not path.is_file():
        raise StartError(f"{folder} has no config.json; is it a model's snapshot?")
    try:
        stored = json.loads(path.read_bytes(), object_hook=_float)
        if not isinstance(stored, dict):
            raise TypeError("it is not a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise StartError(
            f"{path} is damaged: {cuda_errors.one_line(error)}; download it again", Exit.DAMAGED
        ) from error
    stored = model_config.with_quantization(stored, quantization_beside(folder))
    override = _object(options.config_override, "config-override")
    merged = model_config.merge(stored, override)
    kind = str(merged.get("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        return _remote_config(options, merged, kind)
    if kind == "mistral" and "layer_types" in merged:
        kind = "ministral"  # transformers' AutoConfig does the same
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(merged)
        _check_members(config, override, stored)
        _apply_rope(config.get_text_config(), _object(options.rope, "rope"))
    except StartError:
        raise
    except Exception as error:
        raise StartError(f"{path} is not valid for {kind!r}: {cuda_errors.one_line(error)}") from error
    return config


def _check_members(config: Any, override: Mapping[str, Any], stored: Any, path: str = "") -> None:
    """Raise StartError for a member of `override` that neither the config's class nor config.json has."""
    known = {field.name for field in dataclasses.fields(config)} | set(getattr(config, "attribute_map", ()))
    known |= {"model_type", "torch_dtype", "quantization_config", *(stored if isinstance(stored, dict) else ())}
    if "rope_parameters" in known:
        known |= model_config.ROPE_NAMES
    for name, value in override.items():
        inner = getattr(config, name, None)
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            nested = [key for key in config.sub_configs if hasattr(getattr(config, key, None), name)]
            hint = f'; did you mean "{path}{near[0]}"?' if near else ""
            hint = f'; write it into "{path}{nested[0]}"' if nested else hint
            raise StartError(f'config-override: {type(config).__name__} has no member "{path}{name}"{hint}', Exit.USAGE)
        if isinstance(value, dict) and isinstance(inner, transformers.PreTrainedConfig):
            _check_members(inner, value, stored.get(name) if isinstance(stored, dict) else None, f"{path}{name}.")
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            sources = [Path(transformers.__file__).with_name("modeling_rope_utils.py")]
            sources += Path(inspect.getfile(type(config))).parent.glob("*.py")  # those of the architecture
            # Older files have no names of kinds of layers.
            stored_names = json.dumps([stored, getattr(config, "layer_types", None)])
            texts = [stored_names, *(source.read_text("utf-8") for source in sources)]
            _check_rope(value, set(re.findall(r"\w+", " ".join(texts))), f"{path}{name}")


def _check_rope(rope: Mapping[str, Any], known: Collection[str], path: str) -> None:
    """Raise StartError for a member or a kind of scaling that is not `known`: neither the code of transformers nor
    config.json mentions it. transformers only warns, or fails when it builds the model."""
    for name, value in rope.items():
        if isinstance(value, dict):  # of one kind of layers
            _check_rope(value, known, f"{path}.{name}")
        for word in (name, value) if name in ("rope_type", "type") else (name,):
            if word is not None and word not in known:
                near = difflib.get_close_matches(str(word), sorted(known), n=1)
                hint = f'; did you mean "{near[0]}"?' if near else ""
                raise StartError(f'config-override: {path} has no "{word}"{hint}', Exit.USAGE)


def _apply_rope(config: Any, keys: Mapping[str, Any]) -> None:
    """Change the rotation of positions by the RoPE keys of the preset. Raises StartError if the model has none."""
    if not getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        if model_config.needs_rope(keys):
            raise StartError(
                f"{', '.join(keys)}: architecture {config.model_type!r} has no RoPE that can be changed; remove it",
                Exit.USAGE,
            )
        return
    if not keys:
        return
    try:
        members = model_config.rope_members(config.to_dict(), keys)
    except ValueError as error:
        raise StartError(str(error), Exit.USAGE) from None
    for name, value in members.items():
        setattr(config, name, value)
    try:
        config.validate_rope()
    except (TypeError, ValueError) as error:
        why = cuda_errors.one_line(error)
        message = f"{', '.join(keys)}: architecture {config.model_type!r} does not take it: {why}"
        raise StartError(message, Exit.USAGE) from error


def _float(value: dict[str, Any]) -> Any:
    """Decode transformers' notation for numbers without JSON syntax, {"__float__": "Infinity"}."""
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
    keys = _object(options.rope, "rope")
    if model_config.needs_rope(keys):
        raise StartError(
            f"{', '.join(keys)}: not supported for code of the snapshot; write members of its config.json into"
            " config-override",
            Exit.USAGE,
        )
    with own_code("its configuration"):
        config = transformers.AutoConfig.from_pretrained(
            options.snapshot, trust_remote_code=True, local_files_only=True
        )
    for key, value in _object(options.config_override, "config-override").items():
        setattr(config, key, value)  # the snapshot's code may read members that its config does not state
    if merged.get("quantization_config"):
        config.quantization_config = merged["quantization_config"]
    return config


def settle(tokenizer: transformers.PreTrainedTokenizerBase, snapshot: Path) -> None:
    """Make `tokenizer` lower-case its input if the snapshot's files request it. Raises StartError."""
    if not sentence_transformers_config.lowercases(snapshot):
        return
    if not tokenizer.is_fast:
        raise StartError("sentence_bert_config.json sets do_lower_case, which needs a fast tokenizer (tokenizer.json)")
    backend = tokenizer.backend_tokenizer
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Context of code from the snapshot (described by `what`). Its errors become StartError: it would fail again the
    same way."""
    try:
        yield
    except Exception as error:
        if cuda_errors.is_exhausted(error) or cuda_errors.is_sticky(error):
            raise
        raise StartError(
            f"the snapshot's own code ({what}) does not run with transformers {transformers.__version__}:"
            f" {type(error).__name__}: {cuda_errors.one_line(error)}"
        ) from error


@contextmanager
def native_code(config: Any) -> Iterator[None]:
    """Context of transformers' own model code. Errors that it raises for the config, or for an unsupported cache,
    become StartError: it would fail again the same way."""
    try:
        yield
    except Exception as error:
        if not cuda_errors.is_of_code(error) or not cuda_errors.comes_from(error, "transformers"):
            raise
        raise StartError(
            f"architecture {config.model_type!r} does not run here as config.json describes it:"
            f" {type(error).__name__}: {cuda_errors.one_line(error)}; if no config-override is the cause, serve it"
            " with another program"
        ) from error


def _object(text: str, option: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(f"{option} is not valid JSON: {error}", Exit.USAGE) from error
    if not isinstance(value, dict):
        raise StartError(f"{option} must be a JSON object", Exit.USAGE)
    return value


def is_embedder(options: ModelOptions, config: Any) -> bool:
    """True if the model is an embedder: by `task`, else by the snapshot's files."""
    if options.task != "auto":
        return options.task == "embed"
    if is_cross_encoder(options, config):
        return False
    names = getattr(config, "architectures", None)
    generates = any(name.endswith(GENERATES) for name in names or ()) or remote_generator(config) is not None
    if not names:
        generates = generates or config.model_type in VERIFIED
    return sentence_transformers_config.is_layout(Path(options.snapshot)) or not generates


def encodes(options: ModelOptions, config: Any) -> bool:
    """True if the model embeds or scores texts instead of generating them. Raises StartError as `is_cross_encoder`."""
    return is_cross_encoder(options, config) or is_embedder(options, config)


def is_cross_encoder(options: ModelOptions, config: Any) -> bool:
    """True if the model scores pairs of texts: by `task`, else if it has a classification head without pooling.

    Raises StartError if `task` is rerank without such a head, or if the head has several labels.
    """
    names: list[str] = getattr(config, "architectures", None) or []
    has_head = any(name.endswith("ForSequenceClassification") for name in names)
    if options.task != "rerank" and (options.task != "auto" or not has_head):
        return False
    if options.task == "auto" and sentence_transformers_config.has_pooling(Path(options.snapshot)):
        return False
    if fault := scoring_fault(names, config.num_labels):
        raise StartError(fault)
    return True


def own_classes(config: Any) -> Mapping[str, Any]:
    """Classes of the snapshot's own code by auto class; empty if config.json has no auto_map."""
    mapped = getattr(config, "auto_map", None)
    return mapped if isinstance(mapped, dict) else {}


def remote_generator(config: Any) -> str | None:
    """Reference to the snapshot's own class for text generation, if it has one."""
    mapped = own_classes(config)
    found = mapped.get("AutoModelForCausalLM") or mapped.get("AutoModelForSeq2SeqLM")
    return str(found) if found else None


def is_own_code(options: ModelOptions, config: Any) -> bool:
    """True if the model's class is code of its snapshot. Raises StartError as `model_class`."""
    if not options.trust_remote_code:
        return False
    module: str = model_class(options, config, is_embedder(options, config)).__module__
    return module.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


def model_class(options: ModelOptions, config: Any, embeds: bool) -> Any:
    if is_cross_encoder(options, config):
        if type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        return _remote_class(options, config, "AutoModelForSequenceClassification", "that scores pairs")
    if not embeds:
        return _generator_class(options, config)
    encoder: Any = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    if encoder is not None and encoder.__name__.endswith("EncoderModel"):
        return encoder  # T5 and its relatives without their decoder, as sentence-transformers loads them
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(
            f"architecture {config.model_type!r} has an encoder and a decoder, and embedding needs only one;"
            " set task = generate"
        )
    if type(config) in transformers.MODEL_MAPPING:
        return _mapped(transformers.MODEL_MAPPING, config)
    return _remote_class(options, config, "AutoModel", "that gives hidden states")


def _remote_class(options: ModelOptions, config: Any, name: str, what: str) -> Any:
    """The class that the snapshot's code offers under `name`. Runs that code, which `load_config` has permitted."""
    reference = own_classes(config).get(name)
    if reference is None:
        raise StartError(f"architecture {config.model_type!r} has no model {what}")
    return _from_snapshot(options, str(reference))


def _generator_class(options: ModelOptions, config: Any) -> Any:
    """The class that generates text. Raises StartError if there is none."""
    kind, crosses = config.model_type, getattr(config, "is_encoder_decoder", False)
    mapping: Any = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if crosses else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    reference = remote_generator(config)
    if type(config) not in mapping and reference is not None and options.trust_remote_code:
        return _from_snapshot(options, reference)
    seeing: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in seeing and (kind in VISION or not _is_built_from(mapping, config)):
        mapping = seeing  # language-model classes are preferred unless the tests cover the family's images
    if type(config) not in mapping:
        raise StartError(
            f"architecture {kind!r} has no class in transformers {transformers.__version__} that goes from text to"
            " text; an encoder is served with task = embed, anything else not by this engine"
        )
    cls = _mapped(mapping, config)
    if cls.main_input_name != "input_ids":
        raise StartError(f"architecture {kind!r} reads {cls.main_input_name}, and no text; this engine cannot serve it")
    reads_all = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not crosses
    if reads_all and not getattr(config, "is_decoder", False):
        raise StartError(
            f"architecture {kind!r} is an encoder: each of its tokens sees those behind it, too, so that it cannot go"
            " on with a text; set task = embed"
        )
    return cls


def _is_built_from(mapping: Any, config: Any) -> bool:
    """True if `mapping` has a class for this configuration itself. Of some vision models (Qwen3.5, Llama 4) it has the
    class of the text part, which is built from a part of the configuration."""
    return type(config) in mapping and isinstance(config, _mapped(mapping, config).config_class)


def _mapped(mapping: Any, config: Any) -> Any:
    """The class for a configuration in one of transformers' tables, the first one if there are several."""
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _from_snapshot(options: ModelOptions, reference: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # late: only for remote code

    with own_code(reference):
        return get_class_from_dynamic_module(reference, options.snapshot, local_files_only=True)


def has_pooler(cls: Any) -> bool:
    return "add_pooling_layer" in cls.__init__.__code__.co_varnames


def keeps_float32(cls: Any) -> bool:
    """True if transformers must convert the weights, because it keeps some modules in float32."""
    return bool(getattr(cls, "_keep_in_fp32_modules", None) or getattr(cls, "_keep_in_fp32_modules_strict", None))
