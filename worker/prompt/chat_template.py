"""Chats: what a request's messages may be, and how the model's template makes one prompt of them."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
import orjson

from worker.errors import InvalidValue, StartError, UnsupportedByModel, UnsupportedField
from worker.images import TEXT_ONLY, Image, from_url
from worker.prompt.body_reader import Fields, Json, parse_setting
from worker.protocol.dialects.generation_fields import MAX_TOOLS, ROLES
from worker.protocol.dialects.openai import DETAILS
from worker.protocol.exits import Exit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IMAGES = ("image_url", "input_image", "image")
_MODALITIES = {
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}
_NOT_THERE = "images may stand in messages of the user only"
_PROBE, _ANSWER = "probe-7f3a", "answer-7f3a"
_STRUCTURE = re.compile(r"""['"]type['"]\s*:""")
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises about messages that it was not written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the template is told. `variables` are its further ones, by name."""

    messages: Sequence[Json]
    variables: Mapping[str, Any]
    tools: Sequence[Json] = ()
    documents: Sequence[Json] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    before: Sequence[int] = ()
    """Tokens of a prompt and its answer, from which the messages go on."""

    @property
    def size(self) -> int:
        """Characters of all contents, about; images do not count."""
        return sum(len(part) for message in self.messages for part in _parts(message) if isinstance(part, str))

    @property
    def images(self) -> list[Image]:
        """In the order in which they stand in the messages."""
        return [part for message in self.messages for part in _parts(message) if isinstance(part, Image)]


class Template:
    """The model's chat template: the tokenizer's, or the one that the preset states instead."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, text: str, variables: str, placeholder: str = ""):
        """`text`: Jinja, empty for the tokenizer's own; `variables`: a JSON object for every rendering, or empty;
        `placeholder`: what a prompt has for an image, empty for a model that takes none.

        Raises StartError if the template does not compile or the variables are no object.
        """
        self._tokenizer = tokenizer
        self._text = text or None
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        stated = parse_setting(variables)
        if stated is None:
            raise StartError("chat-template-kwargs: must be a JSON object", Exit.USAGE)
        try:
            self._check_names(stated)
        except InvalidValue as error:
            raise StartError(error.message, Exit.USAGE) from None
        self._variables = stated
        self._source = self._compile() if self.exists else ""
        self._placeholder = placeholder
        self._wants_parts = self.exists and not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])
        """Its messages are lists of parts; it shows nothing of a plain text."""
        self._places_images = (
            bool(placeholder)
            and self.exists
            and self._shows([{"type": "image"}, {"type": "text", "text": _PROBE}], placeholder)
        )
        """It has a word for images of its own; else the placeholder is written where they stand."""

    @property
    def source(self) -> str:
        """Its text; of several templates, all of them."""
        return self._source

    @property
    def exists(self) -> bool:
        return self._text is not None or bool(self._tokenizer.chat_template)

    def mentions(self, word: str) -> bool:
        """Whether the template's text holds `word`: if not, a variable of that name makes no difference."""
        return word in self._source

    def render(self, conversation: Conversation) -> str:
        """The prompt. Raises InvalidValue with the template's own words where it refuses these messages.

        Takes time in proportion to the text: for a long one, call it from a thread.
        """
        if not self.exists:
            raise UnsupportedByModel(
                "this model has no chat template; use /v1/completions, or set chat-template in its preset"
            )
        self._check_names(conversation.variables)
        messages = [self._written(message) for message in conversation.messages]
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages,
                tools=list(conversation.tools) or None,
                documents=list(conversation.documents) or None,
                chat_template=self._text,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tokenize=False,
                **{**self._variables, **conversation.variables},
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidValue(f"the chat template refuses these messages: {error}", param="messages") from None
        except RecursionError:
            raise InvalidValue("messages are nested too deeply for the chat template", param="messages") from None
        return str(prompt)

    def render_on(self, conversation: Conversation) -> str:
        """What the conversation adds to a prompt and its answer, from the end of the answer's text on: what closes a
        turn of the assistant, and the new messages, without what stands before the first of all. Errors and time as of
        `render`."""
        begun = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _ANSWER}]
        if conversation.messages[0]["role"] == "system":  # many templates take such a message as the first one only
            closing = replace(conversation, messages=begun, add_generation_prompt=False)
            return self.render(closing).partition(_ANSWER)[2] + self._without_start(conversation)
        whole = self.render(replace(conversation, messages=[*begun, *conversation.messages]))
        _, found, added = whole.partition(_ANSWER)
        return added if found else self._without_start(conversation)

    def _without_start(self, conversation: Conversation) -> str:
        return self.render(conversation).removeprefix(str(self._tokenizer.bos_token or ""))

    def _written(self, message: Json) -> Json:
        """The message as the template wants it: a text, or parts of which each has a type."""
        parts = _parts(message)
        if self._wants_parts or (self._places_images and any(isinstance(part, Image) for part in parts)):
            told = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
            return {**message, "content": told}
        return {
            **message,
            "content": "\n".join(part if isinstance(part, str) else self._placeholder for part in parts),
        }

    def _shows(self, content: Any, *further: str) -> bool:
        """Whether the text of such a content comes out in the prompt, and its structure does not."""
        try:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], chat_template=self._text, tokenize=False, **self._variables
            )
        except (*_TEMPLATE_FAULTS, RecursionError):
            return False
        return all(word in prompt for word in (_PROBE, *further)) and not _STRUCTURE.search(str(prompt))

    def _check_names(self, variables: Mapping[str, Any]) -> None:
        taken = self._reserved & variables.keys()
        if taken:
            name = min(taken)
            raise InvalidValue(
                f"chat_template_kwargs cannot set {name}: it has a meaning of its own", param="chat_template_kwargs"
            )

    def _compile(self) -> str:
        """The template's text, once it is known to compile."""
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}], chat_template=self._text, tokenize=False, **self._variables
            )
        except jinja2.TemplateSyntaxError as error:
            raise StartError(
                f"chat template, line {error.lineno}: {error.message}; set another with chat-template in the preset"
            ) from None
        except _TEMPLATE_FAULTS:
            pass  # it compiles; that it wants other messages than this one is its right
        templates = self._text or self._tokenizer.chat_template
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)


def read(fields: Fields, template: Template, *, blind: str = TEXT_ONLY) -> Conversation:
    """The request's messages and what goes with them to the template. `blind`: why images cannot be, empty if they can.

    Raises InvalidValue or UnsupportedField naming the field; images are not opened yet. `tools` are read but not
    judged: whether they may be shown is the face's affair.
    """
    stated = enumerate(_required(fields))
    messages = [_message(f"messages[{index}]", message, fields, blind) for index, message in stated]
    if not template.mentions("developer"):
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    is_continued = fields.flag("continue_final_message") or False
    adds_prompt = fields.flag("add_generation_prompt")
    if is_continued and adds_prompt:
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other; state one",
            param="continue_final_message",
        )
    if is_continued and messages[-1]["role"] != "assistant":
        raise InvalidValue(
            "continue_final_message needs a last message of the assistant", param="continue_final_message"
        )
    return Conversation(
        messages=messages,
        variables=_variables(fields, template),
        tools=read_tools(fields),
        documents=_documents(fields, template),
        add_generation_prompt=not is_continued if adds_prompt is None else adds_prompt,
        continue_final_message=is_continued,
    )


def _required(fields: Fields) -> list[Any]:
    messages = fields.sequence("messages")
    if not messages:
        raise InvalidValue("messages must be an array of at least one message", param="messages")
    return messages


def _documents(fields: Fields, template: Template) -> list[Json]:
    documents = fields.sequence("documents") or []
    if not all(isinstance(each, dict) for each in documents):
        raise InvalidValue("documents must be an array of objects", param="documents")
    if documents and not template.mentions("documents"):
        fields.mark_unused("documents")
    return documents


def _variables(fields: Fields, template: Template) -> Json:
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    effort = fields.choice("reasoning_effort")
    verbosity = fields.choice("verbosity")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
        if not template.mentions("reasoning_effort") and not (
            effort == "none" and template.mentions("enable_thinking")
        ):
            fields.mark_unused("reasoning_effort")
    if verbosity is not None:
        variables.setdefault("verbosity", verbosity)
        if not template.mentions("verbosity"):
            fields.mark_unused("verbosity")
    return variables


def read_tools(fields: Fields) -> list[Json]:
    """The functions that a model may call, with a name each; raises InvalidValue."""
    tools = fields.sequence("tools") or []
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"tools must have at most {MAX_TOOLS} entries", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue(f"tools[{index}] must be of type function and name one", param=f"tools[{index}]")
    return tools


def _parts(message: Json) -> list[str | Image]:
    """Texts and images of a message as `read` gives it."""
    content: str | list[str | Image] | None = message.get("content")
    return content if isinstance(content, list) else [content or ""]


def _message(where: str, message: Any, fields: Fields, blind: str) -> Json:
    """The message as templates know it: content is text, or texts and images; arguments of tool calls are objects."""
    if not isinstance(message, dict):
        raise InvalidValue(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidValue(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise UnsupportedField(f"{where}.{name} is not supported; leave it out", param=f"{where}.{name}")
    if role != "user":
        blind = blind or _NOT_THERE
    plain: Json = {"role": role, "content": _content(f"{where}.content", message.get("content"), fields, blind)}
    calls = _tool_calls(f"{where}.tool_calls", message.get("tool_calls")) if role == "assistant" else []
    if calls:
        plain["tool_calls"] = calls
    plain |= _texts(where, message, ("name", "tool_call_id", "reasoning_content"))
    if role == "assistant":
        plain = _of_assistant(where, plain, _texts(where, message, ("refusal", "reasoning")), fields)
    if plain["content"] is None:
        if not calls and "reasoning_content" not in plain:
            raise InvalidValue(f"{where}.content is missing", param=f"{where}.content")
        plain["content"] = ""  # a template that adds contents up fails on null
    return plain


def _texts(where: str, message: Json, names: Iterable[str]) -> dict[str, str]:
    """The members of a message with these names, as far as there are any."""
    stated = {name: message[name] for name in names if message.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, str):
            raise InvalidValue(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return stated


def _of_assistant(where: str, plain: Json, said: Mapping[str, str], fields: Fields) -> Json:
    """A message with what some servers say of an answer in other words: a `refusal` is content where there is no other,
    `reasoning` is `reasoning_content`."""
    refusal, thoughts = said.get("refusal"), said.get("reasoning")
    if refusal is not None:
        if plain["content"] is None:
            plain["content"] = refusal
        elif refusal:
            fields.mark_unused("messages[].refusal")
    if thoughts is not None and plain.setdefault("reasoning_content", thoughts) != thoughts:
        raise InvalidValue(
            f"{where}.reasoning and {where}.reasoning_content mean the same but differ; state one",
            param=f"{where}.reasoning",
        )
    return plain


def _content(where: str, content: Any, fields: Fields, blind: str) -> str | list[str | Image] | None:
    """The text of a string or of text parts, or texts and images; texts that follow each other are put on lines of
    their own."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{where} must be a string or an array of parts", param=where)
    parts: list[str | Image] = []
    for index, part in enumerate(content):
        read = _part(f"{where}[{index}]", part, fields, blind)
        if isinstance(read, str) and parts and isinstance(parts[-1], str):
            parts[-1] = f"{parts[-1]}\n{read}"
        else:
            parts.append(read)
    if any(isinstance(part, Image) for part in parts):
        return parts
    return str(parts[0]) if parts else ""


def _part(where: str, part: Any, fields: Fields, blind: str) -> str | Image:
    if isinstance(part, Image):  # another face has read it
        where = part.where
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return str(part[kind])
    if isinstance(part, Image) or kind in _IMAGES:
        if blind:
            raise UnsupportedField(f"{where}: {blind}", param=where)
        return part if isinstance(part, Image) else _image(where, part, fields)
    modality = _MODALITIES.get(kind) if isinstance(kind, str) else None
    if modality:
        raise UnsupportedField(f"{where}: this model takes text, not {modality}", param=where)
    raise InvalidValue(f'{where} must be {{"type": "text", "text": string}}', param=where)


def _image(where: str, part: Json, fields: Fields) -> Image:
    """An image part: `image_url` as OpenAI has it, an object; a bare URL is understood as well."""
    stated = part.get("image_url", part.get("image"))
    if not isinstance(stated, dict):
        return detailed(where, stated, part.get("detail"), fields)
    return detailed(where, stated.get("url"), stated.get("detail"), fields)


def detailed(where: str, url: Any, detail: Any, fields: Fields) -> Image:
    """The image in a data URL. How closely to look at it is the model's affair: `detail` is reported as ignored."""
    if detail is not None and detail not in DETAILS:
        raise InvalidValue(f"{where}: detail must be one of {', '.join(DETAILS)}", param=where)
    if detail not in (None, "auto"):
        fields.mark_unused(f"{where}.detail")
    return from_url(where, url)


def _tool_calls(where: str, calls: Any) -> list[Json]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidValue(f"{where} must be an array", param=where)
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidValue(f"{where}.function must be an object with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _to_object(arguments)
    elif not isinstance(arguments, dict):
        raise InvalidValue(f"{where}.function.arguments must be a string", param=where)
    known: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **known} if isinstance(call.get("id"), str) else known


def _to_object(arguments: str) -> Json | str:
    """Templates of tool-using models expect an object; what a model once wrote amiss stays the string it was."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
