"""The class that a snapshot's model is made of: one of transformers, or of the snapshot's own code."""

from typing import Any

import transformers
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from worker.engines.transformers.load.snapshot import (
    is_cross_encoder,
    is_embedder,
    own_classes,
    own_code,
    remote_generator,
)
from worker.errors import StartError
from worker.protocol.architectures import VISION
from worker.protocol.argv import ModelOptions


def is_own_code(options: ModelOptions, config: Any) -> bool:
    """Whether the model is code of its snapshot, and none of transformers. Raises StartError as `model_class`."""
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
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"architecture {config.model_type!r} has an encoder and a decoder; embedding needs only one")
    if type(config) in transformers.MODEL_MAPPING:
        mapped: Any = transformers.MODEL_MAPPING[type(config)]
        return mapped[0] if isinstance(mapped, tuple) else mapped
    return _remote_class(options, config, "AutoModel", "that gives hidden states")


def _remote_class(options: ModelOptions, config: Any, name: str, what: str) -> Any:
    """The class that the snapshot's own code offers under `name`; it runs that code, which `load_config` has let
    through."""
    reference = own_classes(config).get(name)
    if reference is None:
        raise StartError(f"architecture {config.model_type!r} has no model {what}")
    return _from_snapshot(options, str(reference))


def _generator_class(options: ModelOptions, config: Any) -> Any:
    """The class that goes from text to text. Raises StartError if there is none."""
    kind, crosses = config.model_type, getattr(config, "is_encoder_decoder", False)
    mapping: Any = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if crosses else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    reference = remote_generator(config)
    if type(config) not in mapping and reference is not None and options.trust_remote_code:
        return _from_snapshot(options, reference)
    seeing: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in seeing and (kind in VISION or type(config) not in mapping):
        mapping = seeing  # as language models, unless our tests have compared what they make of images, too
    if type(config) not in mapping:
        raise StartError(
            f"architecture {kind!r} has no class in transformers {transformers.__version__} that goes from text to"
            " text; an encoder is served with task = embed, anything else not by this engine"
        )
    cls: Any = mapping[type(config)]
    cls = cls[0] if isinstance(cls, tuple) else cls
    if cls.main_input_name != "input_ids":
        raise StartError(f"architecture {kind!r} reads {cls.main_input_name}, and no text; this engine cannot serve it")
    reads_all = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not crosses
    if reads_all and not getattr(config, "is_decoder", False):
        raise StartError(
            f"architecture {kind!r} is an encoder: each of its tokens sees those behind it, too, so that it cannot go"
            " on with a text; set task = embed"
        )
    return cls


def _from_snapshot(options: ModelOptions, reference: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # late: only for remote code

    with own_code(reference):
        return get_class_from_dynamic_module(reference, options.snapshot, local_files_only=True)


def has_pooler(cls: Any) -> bool:
    return "add_pooling_layer" in cls.__init__.__code__.co_varnames


def keeps_float32(cls: Any) -> bool:
    """Whether transformers itself must convert, as it leaves some modules in float32."""
    return bool(getattr(cls, "_keep_in_fp32_modules", None) or getattr(cls, "_keep_in_fp32_modules_strict", None))
