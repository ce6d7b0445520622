"""Chats: validation of a request's messages, and rendering with the model's chat template."""

import hashlib
import inspect
import itertools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
import orjson

from worker.errors import InvalidValue, StartError, UnsupportedByModel, UnsupportedField
from worker.images import TEXT_ONLY, EncodedImage, from_url
from worker.prompt.body_reader import BodyFields, Json, parse_setting
from worker.prompt.text_limits import strings_length
from worker.protocol.dialects.generation_fields import MAX_TOOLS, ROLES
from worker.protocol.dialects.openai import DETAILS
from worker.protocol.events import Exit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_IMAGES = ("image_url", "input_image", "image")
_MODALITIES = {
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}
USER_IMAGES_ONLY = "images are supported in user messages only"
_PROBE, _ANSWER = "probe-7f3a", "answer-7f3a"
_STRUCTURE = re.compile(r"""['"]type['"]\s*:""")
# `thinking` as a variable in a condition (DeepSeek-V3.1, Granite), not as a member of a message
_THINKING = re.compile(r"""\{%-?[^%]*(?<![.\w'"-])thinking(?![\w'"-])""")
# errors that a template raises for messages that it does not support
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Input of the chat template. `variables` are additional template variables by name."""

    messages: Sequence[Json]
    variables: Mapping[str, Any]
    tools: Sequence[Json] = ()
    documents: Sequence[Json] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    before: Sequence[int] = ()  # tokens of an earlier prompt and its answer, which the messages continue

    @property
    def size(self) -> int:
        """Number of characters of all that is rendered, without images."""
        return strings_length(self.messages, self.tools, self.documents, self.variables)

    @property
    def images(self) -> list[EncodedImage]:
        """Images in the order of the messages."""
        return [part for message in self.messages for part in _parts(message) if isinstance(part, EncodedImage)]


class ChatTemplate:
    """The model's chat template: the tokenizer's, or the preset's replacement for it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, text: str, variables: str, placeholder: str = ""):
        """`text`: Jinja source, empty for the tokenizer's own template. `variables`: JSON object with variables of
        every rendering, or empty. `placeholder`: text for an image in a prompt, empty if the model takes no images.

        Raise StartError if the template does not compile or the variables are not an object.
        """
        self._tokenizer = tokenizer
        self._text = text or None
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        given = parse_setting(variables)
        if given is None:
            raise StartError("chat-template-kwargs: must be a JSON object", Exit.USAGE)
        try:
            self._check_names(given)
        except InvalidValue as error:
            raise StartError(error.message, Exit.USAGE) from None
        self._variables = given
        self._source = self._compile() if self.exists else ""
        # The variable by which the template turns reasoning on; empty if it has none.
        self.thinking_switch = "enable_thinking" if self.mentions("enable_thinking") else ""
        if not self.thinking_switch and _THINKING.search(self._source):
            self.thinking_switch = "thinking"
        unused = [name for name in given if not self.mentions(name)]
        if self.exists and unused and not (unused == ["enable_thinking"] and self.thinking_switch):
            _log.warning("chat-template-kwargs: the chat template does not use %s", ", ".join(unused))
        self._placeholder = placeholder
        # the template takes message content as a list of parts and drops plain strings
        self._takes_parts = (
            self.exists and not self._renders(_PROBE) and self._renders([{"type": "text", "text": _PROBE}])
        )
        # The template writes image placeholders itself; otherwise the placeholder is put into the text.
        self._places_images = (
            bool(placeholder)
            and self.exists
            and self._renders([{"type": "image"}, {"type": "text", "text": _PROBE}], placeholder)
        )
        takes_objects = self.exists and self._renders_call({_PROBE: 1})
        # The template writes the arguments of past tool calls as text (DeepSeek-V3 and R1, Phi-4-mini): an object fails
        # there, or is written as Python would print it.
        self.takes_arguments_as_text = self.exists and not takes_objects and self._renders_call(f'{{"{_PROBE}": 1}}')
        # The template rejects ids of tool calls that do not have nine characters (Mistral), such as our own ids.
        self._takes_short_ids = takes_objects and not self._renders_call({_PROBE: 1}, id=f"call_{0:024}")

    @property
    def source(self) -> str:
        """The template's source; several templates are joined."""
        return self._source

    @property
    def exists(self) -> bool:
        return self._text is not None or bool(self._tokenizer.chat_template)

    def mentions(self, word: str) -> bool:
        """Check whether the source contains `word`. If it does not, a variable of that name has no effect."""
        return word in self._source

    def compares_with(self, text: str) -> bool:
        """Check whether the source contains `text` as a string: a role of this model only, such as `ipython`."""
        return bool(text) and (f"'{text}'" in self._source or f'"{text}"' in self._source)

    def render(self, conversation: Conversation) -> str:
        """Render the prompt. Raise InvalidValue with the template's own message if it rejects the messages.

        Takes time in proportion to the text, so render long chats in a thread.
        """
        if not self.exists:
            raise UnsupportedByModel(
                "this model has no chat template; use /v1/completions, or set chat-template in its preset"
            )
        self._check_names(conversation.variables)
        variables = {**self._variables, **conversation.variables}
        if self.thinking_switch:  # on by default, as in llama-server
            variables.setdefault(self.thinking_switch, variables.get("enable_thinking", True))
        messages = [self._to_template_message(message) for message in conversation.messages]
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages,
                tools=list(conversation.tools) or None,
                documents=list(conversation.documents) or None,
                chat_template=self._text,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tokenize=False,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidValue(f"the chat template rejects these messages: {error}", param="messages") from None
        except RecursionError:
            raise InvalidValue("messages are nested too deeply for the chat template", param="messages") from None
        return str(prompt)

    def render_on(self, conversation: Conversation) -> str:
        """Render the text that the conversation adds after an earlier prompt and its answer: the end of the assistant's
        turn and the new messages, without the beginning of text.

        The text is found by rendering a probe answer before the messages. Errors and time are those of `render`.
        """
        probe = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _ANSWER}]
        # many templates accept a system message only as the first one, so it cannot follow the probe
        if conversation.messages[0]["role"] == "system":
            probe_end = replace(conversation, messages=probe, add_generation_prompt=False)
            return self.render(probe_end).partition(_ANSWER)[2] + self._render_without_bos(conversation)
        whole = self.render(replace(conversation, messages=[*probe, *conversation.messages]))
        _, found, added = whole.partition(_ANSWER)
        return added if found else self._render_without_bos(conversation)

    def _render_without_bos(self, conversation: Conversation) -> str:
        return self.render(conversation).removeprefix(str(self._tokenizer.bos_token or ""))

    def _to_template_message(self, message: Json) -> Json:
        """Return the message as the template takes it, with a string or typed parts as content."""
        if self._takes_short_ids:
            message = _with_short_ids(message)
        if "tool_calls" in message:
            message = {**message, "tool_calls": list(map(self._to_template_call, message["tool_calls"]))}
        parts = _parts(message)
        if self._takes_parts or (self._places_images and any(isinstance(part, EncodedImage) for part in parts)):
            typed_parts = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
            ]
            return {**message, "content": typed_parts}
        return {
            **message,
            "content": "\n".join(part if isinstance(part, str) else self._placeholder for part in parts),
        }

    def _to_template_call(self, call: Json) -> Json:
        """Return the call with arguments as the template takes them: an object, or text."""
        function = call["function"]
        arguments = function["arguments"]
        if self.takes_arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _to_object(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def _renders(self, content: Any, *further: str) -> bool:
        """Check that a probe with this content appears in the prompt as text, and not as a dumped data structure."""
        try:
            prompt = self._render_user(content)
        except (*_TEMPLATE_ERRORS, RecursionError):
            return False
        return all(word in prompt for word in (_PROBE, *further)) and not _STRUCTURE.search(prompt)

    def _renders_call(self, arguments: Json | str, *, id: str = "abcdefghi") -> bool:
        """Check that a past tool call with these arguments appears in the prompt, and not as Python prints it."""
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            prompt = self._apply(messages)
        except (*_TEMPLATE_ERRORS, RecursionError):
            return False
        return _PROBE in prompt and f"'{_PROBE}'" not in prompt

    def _render_user(self, content: Any) -> str:
        return self._apply([{"role": "user", "content": content}])

    def _apply(self, messages: list[Any]) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, chat_template=self._text, tokenize=False, **self._variables)
        )

    def _check_names(self, variables: Mapping[str, Any]) -> None:
        clashes = self._reserved & variables.keys()
        if clashes:
            name = min(clashes)
            raise InvalidValue(
                f"chat_template_kwargs must not set {name}: it is reserved", param="chat_template_kwargs"
            )

    def _compile(self) -> str:
        """Check that the template compiles and return its source."""
        try:
            self._render_user("?")
        except jinja2.TemplateSyntaxError as error:
            raise StartError(
                f"chat template, line {error.lineno}: {error.message}; set a valid one with chat-template in the preset"
            ) from None
        except _TEMPLATE_ERRORS:
            pass  # it compiles; it may reject this particular message
        templates = self._text or self._tokenizer.chat_template
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)


def read(fields: BodyFields, template: ChatTemplate, *, no_vision: str = TEXT_ONLY) -> Conversation:
    """Read the request's messages and template variables. `no_vision`: reason why images are not supported, or empty.

    Raise InvalidValue or UnsupportedField naming the field. Images are not decoded here. Tools are read but the
    caller decides whether they are shown.
    """
    given = fields.sequence("messages")
    if not given:
        raise InvalidValue("messages must be an array of at least one message", param="messages")
    messages = [
        _message(f"messages[{index}]", message, fields, template, no_vision) for index, message in enumerate(given)
    ]
    if not template.mentions("developer"):
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    is_continued = fields.flag("continue_final_message") or False
    adds_prompt = fields.flag("add_generation_prompt")
    if is_continued and adds_prompt:
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other; send one of them",
            param="continue_final_message",
        )
    if is_continued and messages[-1]["role"] != "assistant":
        raise InvalidValue(
            "continue_final_message needs an assistant message at the end", param="continue_final_message"
        )
    return Conversation(
        messages=messages,
        variables=_variables(fields, template),
        tools=read_tools(fields),
        documents=_documents(fields, template),
        add_generation_prompt=not is_continued if adds_prompt is None else adds_prompt,
        continue_final_message=is_continued,
    )


def _documents(fields: BodyFields, template: ChatTemplate) -> list[Json]:
    documents = fields.sequence("documents") or []
    if not all(isinstance(document, dict) for document in documents):
        raise InvalidValue("documents must be an array of objects", param="documents")
    if documents and not template.mentions("documents"):
        fields.mark_unused("documents")
    return documents


def _variables(fields: BodyFields, template: ChatTemplate) -> Json:
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    effort = fields.choice("reasoning_effort")
    verbosity = fields.choice("verbosity")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
        if not template.mentions("reasoning_effort") and not (effort == "none" and template.thinking_switch):
            fields.mark_unused("reasoning_effort")
    if verbosity is not None:
        variables.setdefault("verbosity", verbosity)
        if not template.mentions("verbosity"):
            fields.mark_unused("verbosity")
    return variables


def read_tools(fields: BodyFields) -> list[Json]:
    """Return the functions that the model may call. Raise InvalidValue for one without a name."""
    tools = fields.sequence("tools") or []
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"tools must have at most {MAX_TOOLS} entries", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue(
                f"tools[{index}] must have type function and a function with a name", param=f"tools[{index}]"
            )
    return tools


def _parts(message: Json) -> list[str | EncodedImage]:
    """Return texts and images of a message from `read`."""
    content: str | list[str | EncodedImage] | None = message.get("content")
    return content if isinstance(content, list) else [content or ""]


def _message(where: str, message: Any, fields: BodyFields, template: ChatTemplate, no_vision: str) -> Json:
    """Normalize a message for templates: content is a string, or texts and images. Arguments of tool calls are left as
    they are until the size of the chat is checked: JSON takes far more memory than its text."""
    if not isinstance(message, dict):
        raise InvalidValue(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or template.compares_with(role)):
        raise InvalidValue(
            f"{where}.role must be one of {', '.join(ROLES)}, or one that the model's chat template names",
            param=f"{where}.role",
        )
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise UnsupportedField(f"{where}.{name} is not supported; leave it out", param=f"{where}.{name}")
    if role != "user":
        no_vision = no_vision or USER_IMAGES_ONLY
    plain: Json = {"role": role, "content": _content(f"{where}.content", message.get("content"), fields, no_vision)}
    calls = _tool_calls(f"{where}.tool_calls", message.get("tool_calls")) if role == "assistant" else []
    if calls:
        plain["tool_calls"] = calls
    plain |= _texts(where, message, ("name", "tool_call_id", "reasoning_content"))
    if role == "assistant":
        plain = _add_assistant_fields(where, plain, _texts(where, message, ("refusal", "reasoning")), fields)
    if plain["content"] is None:
        if not calls and "reasoning_content" not in plain:
            raise InvalidValue(f"{where}.content is missing", param=f"{where}.content")
        plain["content"] = ""  # templates that concatenate contents fail on null
    return plain


def _with_short_ids(message: Json) -> Json:
    """Return a message from `read` with ids of nine letters and digits. A call and its result keep a common id."""
    message = dict(message)
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in message["tool_calls"]]
    if message["role"] == "tool":
        message["tool_call_id"] = _short_id(message.get("tool_call_id", ""))
    return message


def _short_id(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.blake2b(id.encode()).hexdigest()[:9]


def join_content(parts: Sequence[str | EncodedImage]) -> str | list[Any]:
    """Return message content: the texts joined by newlines, or with images a list of parts."""
    if not any(isinstance(part, EncodedImage) for part in parts):
        return join_texts(parts)
    return [part if isinstance(part, EncodedImage) else {"type": "text", "text": part} for part in parts]


def join_texts(parts: Sequence[str | EncodedImage]) -> str:
    """Join the texts among the parts by newlines."""
    return "\n".join(part for part in parts if isinstance(part, str))


def _texts(where: str, message: Json, names: Iterable[str]) -> dict[str, str]:
    """Return the string members of a message with these names, if present."""
    given = {name: message[name] for name in names if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidValue(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return given


def _add_assistant_fields(where: str, plain: Json, extras: Mapping[str, str], fields: BodyFields) -> Json:
    """Add fields that only some servers use: `refusal` is content if there is no other content, `reasoning` is
    `reasoning_content`."""
    refusal, reasoning = extras.get("refusal"), extras.get("reasoning")
    if refusal is not None:
        if plain["content"] is None:
            plain["content"] = refusal
        elif refusal:
            fields.mark_unused("messages[].refusal")
    if reasoning is not None and plain.setdefault("reasoning_content", reasoning) != reasoning:
        raise InvalidValue(
            f"{where}.reasoning and {where}.reasoning_content mean the same but differ; send one of them",
            param=f"{where}.reasoning",
        )
    return plain


def _content(where: str, content: Any, fields: BodyFields, no_vision: str) -> str | list[str | EncodedImage] | None:
    """Return content as a string, or as texts and images. Consecutive texts are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{where} must be a string or an array of parts", param=where)
    parts = [_part(f"{where}[{index}]", part, fields, no_vision) for index, part in enumerate(content)]
    if not any(isinstance(part, EncodedImage) for part in parts):
        return join_texts(parts)
    found: list[str | EncodedImage] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        together = list(group)
        found += [join_texts(together)] if is_text else together
    return found


def _part(where: str, part: Any, fields: BodyFields, no_vision: str) -> str | EncodedImage:
    if isinstance(part, EncodedImage):  # already parsed by another dialect
        where = part.where
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return str(part[kind])
    if isinstance(part, EncodedImage) or kind in _IMAGES:
        if no_vision:
            raise UnsupportedField(f"{where}: {no_vision}", param=where)
        return part if isinstance(part, EncodedImage) else _image(where, part, fields)
    modality = _MODALITIES.get(kind) if isinstance(kind, str) else None
    if modality:
        raise UnsupportedField(f"{where}: this model takes text, not {modality}", param=where)
    raise InvalidValue(f'{where} must be {{"type": "text", "text": string}}', param=where)


def _image(where: str, part: Json, fields: BodyFields) -> EncodedImage:
    """Return the image of a part. `image_url` is an object as in OpenAI's API; a plain URL is accepted too."""
    given = part.get("image_url", part.get("image"))
    if not isinstance(given, dict):
        return read_image_url(where, given, part.get("detail"), fields)
    return read_image_url(where, given.get("url"), given.get("detail"), fields)


def read_image_url(where: str, url: Any, detail: Any, fields: BodyFields) -> EncodedImage:
    """Return the image of a data URL. `detail` is validated and reported as ignored: the model determines the
    resolution."""
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
    if not isinstance(arguments, (str, dict)):
        raise InvalidValue(f"{where}.function.arguments must be a string", param=where)
    known: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **known} if isinstance(call.get("id"), str) else known


def _to_object(arguments: str) -> Json | str:
    """Parse arguments for templates of tool-using models, which expect an object. Invalid JSON from an earlier answer
    stays a string."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
