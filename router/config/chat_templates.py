"""Chat templates by llama-server's names, as Jinja text. They take no tools.

The formats are those of llama.cpp (src/llama-chat.cpp). A checkpoint's own template is better where it has one. Pure.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from router.config.option_types import Kind, nearest, shown


class _Format(NamedTuple):
    """Text around each message; `{}` is its content, `{role}` its role."""

    system: str
    user: str = ""  # empty: as `system`
    assistant: str = ""  # empty: as `system`
    generation: str = ""  # at the end, before the answer
    opens: str = ""  # before the first message, and before the first one behind each answer
    each: bool = False  # `opens` comes before each user message with its system messages, and not before answers
    reopens: str = ""  # in place of `opens` behind an answer
    strips: str = ""  # roles whose content is stripped
    bos: bool = True  # the prompt begins with the tokenizer's beginning of text


_ALL = "system user assistant tool"
_END, _USER, _ASSISTANT = (  # DeepSeek's special tokens
    f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>".replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    for name in ("end of sentence", "User", "Assistant")
)
_LLAMA2 = _Format("{}\n", "{} [/INST]", "{}</s>", opens="[INST] ")
_SYS = "<<SYS>>\n{}\n<</SYS>>\n\n"


def _command_r(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{{}}<|END_OF_TURN_TOKEN|>"


_FORMATS: Mapping[str, _Format] = {
    "chatml": _Format("<|im_start|>{role}\n{}<|im_end|>\n", generation="<|im_start|>assistant\n", bos=False),
    "command-r": _Format(_command_r("SYSTEM"), _command_r("USER"), _command_r("CHATBOT"),
        generation=_command_r("CHATBOT").partition("{}")[0], strips=_ALL),
    "deepseek": _Format(
        "{}", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", generation="### Response:\n"),
    "deepseek2": _Format("{}\n\n", "User: {}\n\n", f"Assistant: {{}}{_END}", generation="Assistant:"),
    "deepseek3": _Format("{}\n\n", f"{_USER}{{}}", f"{_ASSISTANT}{{}}{_END}", generation=_ASSISTANT),
    "falcon3": _Format("<|{role}|>\n{}\n", generation="<|assistant|>\n", bos=False),
    "gemma": _Format("{}\n\n", "{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n",
        generation="<start_of_turn>model\n", opens="<start_of_turn>user\n", each=True, strips=_ALL),
    "granite": _Format("<|start_of_role|>{role}<|end_of_role|>{}<|end_of_text|>\n",
        generation="<|start_of_role|>assistant<|end_of_role|>\n", bos=False),
    "llama2": _LLAMA2,
    "llama2-sys": _LLAMA2._replace(system=_SYS),
    "llama2-sys-bos": _LLAMA2._replace(system=_SYS, reopens="<s>[INST] "),
    "llama2-sys-strip": _LLAMA2._replace(system=_SYS, strips=_ALL),
    "llama3": _Format("<|start_header_id|>{role}<|end_header_id|>\n\n{}<|eot_id|>",
        generation="<|start_header_id|>assistant<|end_header_id|>\n\n", strips=_ALL),
    "llama4": _Format("<|header_start|>{role}<|header_end|>\n\n{}<|eot|>",
        generation="<|header_start|>assistant<|header_end|>\n\n", strips=_ALL),
    "mistral-v1": _Format("{}\n\n", "{} [/INST]", " {}</s>", opens=" [INST] "),
    "mistral-v3": _Format("{}\n\n", "{}[/INST]", " {}</s>", opens="[INST] ", strips="assistant"),
    "mistral-v3-tekken": _Format("{}\n\n", "{}[/INST]", "{}</s>", opens="[INST]"),
    "mistral-v7": _Format("[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}</s>"),
    "mistral-v7-tekken": _Format("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}</s>"),
    "openchat": _Format("{}<|end_of_turn|>", "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>", generation="GPT4 Correct Assistant:"),
    "phi3": _Format("<|{role}|>\n{}<|end|>\n", generation="<|assistant|>\n", bos=False),
    "phi4": _Format("<|im_start|>{role}<|im_sep|>{}<|im_end|>",
        generation="<|im_start|>assistant<|im_sep|>", bos=False),
    "vicuna": _Format("{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", generation="ASSISTANT:"),
    "vicuna-orca": _Format("SYSTEM: {}\n", "USER: {}\n", "ASSISTANT: {}</s>\n", generation="ASSISTANT:"),
    "zephyr": _Format("<|{role}|>\n{}<|endoftext|>\n", generation="<|assistant|>\n", bos=False),
}  # fmt: skip

NAMES = tuple(_FORMATS)
# Further names of llama-server. Checkpoints of these models have a template of their own, which is used.
_OTHERS = """
bailing bailing-think bailing2 chatglm3 chatglm4 deepseek-ocr exaone-moe exaone3 exaone4 gigachat glmedge gpt-oss
granite-4.0 granite-4.1 grok-2 hunyuan-dense hunyuan-moe hunyuan-vl kimi-k2 megrez minicpm monarch orion pangu-embedded
rwkv-world seed_oss smolvlm solar-open yandex
"""
NOT_OFFERED = frozenset(_OTHERS.split())


class Template(Kind):
    """Jinja text, which a template in `NAMES` may stand for, or a name in `NOT_OFFERED`."""

    hint = "Jinja text, or a name such as chatml"

    def read(self, text: str) -> str:
        if not text or "{{" in text or "{%" in text:
            return text
        if text in NAMES:
            return jinja(text)
        if text in NOT_OFFERED:
            return text  # `resolve` knows the checkpoint, and replaces the name by its own template
        near = nearest(text, NAMES) or nearest(text, NOT_OFFERED)
        hint = f"; did you mean {near}?" if near else "; see chat-template-file"
        self.fail(f"{shown(text)} is neither Jinja text nor the name of a template{hint}")

    def write(self, value: Any) -> str:
        return next((name for name in NAMES if value == jinja(name)), str(value))


@cache
def jinja(name: str) -> str:
    """The Jinja text of a template in `NAMES`."""
    layout = _FORMATS[name]
    parts = ["{{ bos_token }}"] * layout.bos
    if layout.opens:
        parts.append("{% set turn = namespace(open=false, text=" + _literal(layout.opens) + ") %}")
    parts.append("{% for message in messages %}")
    texts = {
        "system": layout.system,
        "assistant": layout.assistant or layout.system,
        "": layout.user or layout.system,
    }
    for index, (role, text) in enumerate(texts.items()):
        condition = f" message.role == '{role}' " if role else " "
        parts.append(f"{{% {'elif' if role and index else 'if' if role else 'else'}{condition}%}}")
        if layout.opens and not (layout.each and role == "assistant"):
            parts.append("{% if not turn.open %}{{ turn.text }}{% set turn.open = true %}{% endif %}")
        parts.append(_message(text, strips=(role or "user") in layout.strips.split()))
        if layout.opens and (role == "assistant" or (layout.each and not role)):
            again = layout.reopens or layout.opens
            parts.append("{% set turn.open = false %}{% set turn.text = " + _literal(again) + " %}")
    parts.append("{% endif %}{% endfor %}")
    if layout.generation:
        parts.append("{% if add_generation_prompt %}" + _shown(layout.generation) + "{% endif %}")
    return "".join(parts)


def _message(text: str, *, strips: bool) -> str:
    before, after = text.split("{}")
    content = "{{ message.content | trim }}" if strips else "{{ message.content }}"
    return _shown(before) + content + _shown(after)


def _shown(text: str) -> str:
    """Literal text as Jinja expressions: blocks swallow a line break behind them."""
    pieces = text.split("{role}")
    return "{{ message.role }}".join("{{ " + _literal(piece) + " }}" if piece else "" for piece in pieces)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
