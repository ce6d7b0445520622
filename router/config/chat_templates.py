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
    begin: str = "{{ bos_token }}"  # Jinja before all messages


_ALL = "system user assistant tool"


def _token(name: str) -> str:
    """A special token in the spelling of DeepSeek and Hunyuan."""
    return f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>".replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")


_END, _USER, _ASSISTANT = map(_token, ("end of sentence", "User", "Assistant"))
_LLAMA2 = _Format("{}\n", "{} [/INST]", "{}</s>", opens="[INST] ")
_SYS = "<<SYS>>\n{}\n<</SYS>>\n\n"


def _for_each(text: str, system: str, user: str, assistant: str) -> tuple[str, str, str]:
    """`text` with other names of the roles."""
    return (text.replace("{role}", system), text.replace("{role}", user), text.replace("{role}", assistant))


def _command_r(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{{}}<|END_OF_TURN_TOKEN|>"


_FORMATS: Mapping[str, _Format] = {
    "chatml": _Format("<|im_start|>{role}\n{}<|im_end|>\n", generation="<|im_start|>assistant\n", begin=""),
    "command-r": _Format(_command_r("SYSTEM"), _command_r("USER"), _command_r("CHATBOT"),
        generation=_command_r("CHATBOT").partition("{}")[0], strips=_ALL),
    "deepseek": _Format(
        "{}", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", generation="### Response:\n"),
    "deepseek2": _Format("{}\n\n", "User: {}\n\n", f"Assistant: {{}}{_END}", generation="Assistant:"),
    "deepseek3": _Format("{}\n\n", f"{_USER}{{}}", f"{_ASSISTANT}{{}}{_END}", generation=_ASSISTANT),
    "falcon3": _Format("<|{role}|>\n{}\n", generation="<|assistant|>\n", begin=""),
    "gemma": _Format("{}\n\n", "{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n",
        generation="<start_of_turn>model\n", opens="<start_of_turn>user\n", each=True, strips=_ALL),
    "granite": _Format("<|start_of_role|>{role}<|end_of_role|>{}<|end_of_text|>\n",
        generation="<|start_of_role|>assistant<|end_of_role|>", begin=""),
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
    "phi3": _Format("<|{role}|>\n{}<|end|>\n", generation="<|assistant|>\n", begin=""),
    "phi4": _Format("<|im_start|>{role}<|im_sep|>{}<|im_end|>",
        generation="<|im_start|>assistant<|im_sep|>", begin=""),
    "vicuna": _Format("{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", generation="ASSISTANT:"),
    "vicuna-orca": _Format("SYSTEM: {}\n", "USER: {}\n", "ASSISTANT: {}</s>\n", generation="ASSISTANT:"),
    "zephyr": _Format("<|{role}|>\n{}<|endoftext|>\n", generation="<|assistant|>\n", begin=""),
}  # fmt: skip

# Further names: a checkpoint's own template takes precedence over these, as it renders tools as well.
_LING = ("SYSTEM", "HUMAN", "ASSISTANT")
_BAILING = _Format(*_for_each("<role>{role}</role>{}", *_LING), generation="<role>ASSISTANT</role>", begin="")
_EXAONE = _Format("[|system|]{}[|endofturn|]\n", "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", strips=_ALL,
    begin="", generation="[|assistant|]")  # fmt: skip
_SYSTEM_TURN = "{%% if messages[0].role != 'system' %%}%s{%% endif %%}"
_COLON = "\N{FULLWIDTH COLON}"
_FALLBACKS: Mapping[str, _Format] = {
    "bailing": _BAILING,
    "bailing-think": _BAILING._replace(generation="<role>ASSISTANT</role><think>"),
    "bailing2": _Format(*_for_each("<role>{role}</role>{}<|role_end|>", *_LING), generation=_BAILING.generation,
        begin=_SYSTEM_TURN % "<role>SYSTEM</role>detailed thinking off<|role_end|>"),
    "chatglm3": _Format("<|{role}|>\n {}", generation="<|assistant|>", begin="[gMASK]sop"),
    "chatglm4": _Format("<|{role}|>\n{}", generation="<|assistant|>\n", begin="[gMASK]<sop>"),
    "deepseek-ocr": _Format("{}"),
    "exaone-moe": _Format("<|{role}|>\n{}<|endofturn|>\n", generation="<|assistant|>\n", strips=_ALL, begin=""),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "gigachat": _Format("{}<|message_sep|>",
        "user<|role_sep|>{}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{}<|message_sep|>", generation="assistant<|role_sep|>"),
    "glmedge": _Format("<|{role}|>\n{}", generation="<|assistant|>", begin=""),
    "gpt-oss": _Format("<|start|>{role}<|message|>{}<|end|>", "", "<|start|>{role}<|message|>{}<|return|>",
        generation="<|start|>assistant", begin=""),
    "granite-4.0": _FORMATS["granite"],
    "granite-4.1": _FORMATS["granite"],
    "grok-2": _Format(*_for_each("{role}: {}<|separator|>\n\n", "System", "Human", "Assistant"),
        generation="Assistant:", strips="system user", begin=""),
    "hunyuan-dense": _Format(f"{{}}{_token('hy_place holder no 3')}", f"{_token('hy_User')}{{}}",
        f"{_token('hy_Assistant')}{{}}{_token('hy_place holder no 2')}", generation=_token("hy_Assistant")),
    "hunyuan-moe": _Format("<|startoftext|>{}<|extra_4|>", "<|startoftext|>{}<|extra_0|>", "{}<|eos|>", begin=""),
    "hunyuan-vl": _Format(f"{{}}{_token('hy_place holder no 3')}", f"{{}}{_token('hy_User')}",
        f"{{}}{_token('hy_Assistant')}"),
    "kimi-k2": _Format("<|im_{role}|>{role}<|im_middle|>{}<|im_end|>",
        generation="<|im_assistant|>assistant<|im_middle|>", begin=""),
    "megrez": _Format("<|role_start|>{role}<|role_end|>{}<|turn_end|>",
        generation="<|role_start|>assistant<|role_end|>", begin=""),
    "minicpm": _Format("{}", "<用户>{}<AI>", strips=_ALL),
    "monarch": _Format("<s>{role}\n{}</s>\n", generation="<s>assistant\n", begin=""),
    "orion": _Format("{}\n\n", "{}\n\nAssistant: </s>", "{}</s>", opens="Human: ", each=True),
    "pangu-embedded": _Format(*_for_each(f"[unused9]{{role}}{_COLON}{{}}[unused10]", "系统", "用户", "助手"),
        generation=f"[unused9]助手{_COLON}", begin=_SYSTEM_TURN % f"[unused9]系统{_COLON}[unused10]"),
    "rwkv-world": _Format(*_for_each("{role}: {}\n\n", "System", "User", "Assistant"),
        generation="Assistant:", strips=_ALL, begin=""),
    "seed_oss": _Format("<seed:bos>{role}\n{}<seed:eos>", generation="<seed:bos>assistant\n", strips="assistant",
        begin=""),
    "smolvlm": _Format("{}\n\n", "User: {}<end_of_utterance>\n", "Assistant: {}<end_of_utterance>\n",
        generation="Assistant:", begin="<|im_start|>"),
    "solar-open": _Format("<|begin|>{role}<|content|>{}<|end|>", generation="<|begin|>assistant", begin=""),
    "yandex": _Format("{}\n", "{}\n\n", " Ассистент: {}\n\n",
        generation=" Ассистент:[SEP]", opens=" Пользователь: ", each=True),
}  # fmt: skip
FALLBACKS = frozenset(_FALLBACKS)
NAMES = (*_FORMATS, *_FALLBACKS)


class Template(Kind):
    """Jinja text, which a template in `NAMES` may stand for."""

    hint = "Jinja text, or a name such as chatml"

    def read(self, text: str) -> str:
        if not text or "{{" in text or "{%" in text:
            return text
        if text in FALLBACKS:
            return text  # `resolve` knows whether the checkpoint has a template of its own
        if text in NAMES:
            return jinja(text)
        near = nearest(text, _FORMATS) or nearest(text, _FALLBACKS)
        hint = f"; did you mean {near}?" if near else "; see chat-template-file"
        self.fail(f"{shown(text)} is neither Jinja text nor the name of a template{hint}")

    def write(self, value: Any) -> str:
        return next((name for name in NAMES if value == jinja(name)), str(value))


@cache
def jinja(name: str) -> str:
    """The Jinja text of a template in `NAMES`."""
    layout = _FORMATS.get(name) or _FALLBACKS[name]
    parts = [layout.begin]
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
