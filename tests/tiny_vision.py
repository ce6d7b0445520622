"""Tiny random-weight snapshots of models that see, processors included, and images for them.

`make("llava", folder)` is as `tests.tiny.make`: the same each time, in a fraction of a second.
"""

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import torch
import transformers
from tokenizers import AddedToken

from tests import tiny

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SIDE = 28
"""Pixels of the images that a tower sees."""
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

_Made = tuple[Any, Any, Any]
"""Tokenizer, processor and configuration."""


def make(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a snapshot of `family` (one of FAMILIES) into `folder`, made if missing, and return it. `overrides` go into
    the configuration of the language model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, processor, config = FAMILIES[family]({**_TEXT, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForImageTextToText
        model = auto.from_config(config)
        tiny.spread(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and not parameter.any():
                    parameter.normal_(0.0, 0.5)  # some begin at nothing, and would show nothing
    with tiny.no_progress_bar():
        model.to(dtype).save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(placeholder: str, *special: str, **named: str) -> Any:
    """`named`: special tokens that the tokenizer has attributes for."""
    plain: Any = tiny.make_tokenizer("llama")
    build: Any = transformers.PreTrainedTokenizerFast  # untyped in transformers
    tokenizer = build(
        tokenizer_object=plain.backend_tokenizer, bos_token=tiny.BOS, eos_token=tiny.EOS, extra_special_tokens=named
    )
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in special], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("PLACE", placeholder)
    return tokenizer


def _words(tokenizer: Any, text: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    return {"vocab_size": len(tokenizer), **ids, **text, **further}


def _llava(text: Mapping[str, Any]) -> _Made:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Opener

    tokenizer = _tokenizer("<image>", "<image>")
    opener: Any = Opener(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    build: Any = transformers.LlavaProcessor  # untyped in transformers
    processor = build(
        image_processor=opener, tokenizer=tokenizer, patch_size=7, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=tokenizer.chat_template,
    )  # fmt: skip
    configure: Any = transformers.LlavaConfig  # image_token_id is image_token_index by another name
    config = configure(
        vision_config={"model_type": "clip_vision_model", **_TOWER, "num_hidden_layers": 3, "image_size": SIDE,
                       "patch_size": 7, "projection_dim": 32},
        text_config=_words(tokenizer, text, model_type="llama"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=16, vision_feature_layer=-2,
    )  # fmt: skip
    return tokenizer, processor, config


def _idefics3(text: Mapping[str, Any]) -> _Made:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Opener

    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(
        "<image>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places
    )
    opener: Any = Opener(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = transformers.Idefics3Processor(
        image_processor=opener, tokenizer=tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    config = transformers.Idefics3Config(
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        text_config=_words(tokenizer, text, model_type="llama"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
    )  # fmt: skip
    return tokenizer, processor, config


def _gemma3(text: Mapping[str, Any]) -> _Made:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Opener

    tokenizer = _tokenizer(
        "<start_of_image>",
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>",
    )  # fmt: skip
    opener: Any = Opener(size={"height": 24, "width": 24})
    processor = transformers.Gemma3Processor(
        image_processor=opener, tokenizer=tokenizer, image_seq_length=9, chat_template=tokenizer.chat_template
    )
    begin, end, soft = (tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
                        for name in ("boi", "eoi", "image"))  # fmt: skip
    # a window shorter than the prompts, and layers of both kinds
    words = {"head_dim": 16, "sliding_window": 24, "tie_word_embeddings": False, **text, "num_hidden_layers": 6}
    config = transformers.Gemma3Config(
        vision_config={**_TOWER, "image_size": 24, "patch_size": 4}, text_config=_words(tokenizer, words),
        mm_tokens_per_image=9, tie_word_embeddings=False, image_token_index=soft, boi_token_index=begin,
        eoi_token_index=end,
    )  # fmt: skip
    return tokenizer, processor, config


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], _Made]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "llava": _llava,
}


def picture(width: int = 40, height: int = 30, *, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    """Noise, the same each time."""
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def encoded(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> str:
    """The image's file in base64."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return base64.b64encode(file.getvalue()).decode()


def data_url(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> str:
    return f"data:image/{form.lower()};base64,{encoded(image, form, **options)}"
