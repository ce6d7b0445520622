"""Validation of a chat's messages and rendering with templates."""

import time
from typing import Any

import pytest

from tests.worker import serving
from worker.errors import InvalidValue, RequestError, StartError, UnsupportedField
from worker.prompt import chat_template
from worker.prompt.body_reader import BodyFields
from worker.prompt.chat_template import ChatTemplate
from worker.protocol.dialects.generation_fields import ROLES
from worker.protocol.dialects.openai import CONVERSATION
from worker.protocol.events import Exit

SHOWING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ '[go]' if add_generation_prompt }}"
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}(SHOWN){% endfor %}{% endfor %}"


def template(text: str = SHOWING, variables: str = "") -> ChatTemplate:
    return ChatTemplate(serving.tokenizer(), text=text, variables=variables)


def prompt(body: dict[str, Any], made: ChatTemplate | None = None) -> str:
    made = made or template()
    return made.render(chat_template.read(BodyFields(body, CONVERSATION), made))


def said(*messages: Any, **further: Any) -> dict[str, Any]:
    return {"messages": list(messages), **further}


USER = {"role": "user", "content": "hi"}


def test_a_chat_becomes_the_prompt_of_the_tokenizers_template() -> None:
    body = said({"role": "system", "content": "be kind"}, USER)
    assert prompt(body, template("")) == "<s><|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n"


PARTS = (
    "{% for m in messages %}[{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<picture>{% else %}{{ p.text }}{% endif %}{% endfor %}]{% endfor %}"
)
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
HERE = {"type": "text", "text": "here"}


def seen(text: str, *content: Any) -> str:
    """Render for a vision model whose image placeholder is `<image>` unless the template writes one itself."""
    made = ChatTemplate(
        serving.tokenizer(), text=text, variables="", placeholder="<image>" if "<p" not in text else "<p"
    )
    body = said({"role": "user", "content": list(content)})
    return made.render(chat_template.read(BodyFields(body, CONVERSATION), made, no_vision=""))


def test_a_template_for_parts_gets_parts() -> None:
    assert prompt(said(USER), template(PARTS)) == "[user:hi]", "a text would be taken for letters, each of no type"


def test_the_template_places_images() -> None:
    assert seen(PARTS, HERE, PIXEL, HERE) == "[user:here<picture>here]"


def test_without_images_in_the_template_the_placeholder_is_a_line_of_text() -> None:
    assert seen(SHOWING, HERE, PIXEL, HERE) == "[user:here\n<image>\nhere][go]"


def test_images_are_in_the_order_of_the_messages() -> None:
    made = ChatTemplate(serving.tokenizer(), text=PARTS, variables="", placeholder="<picture>")
    body = said({"role": "user", "content": [PIXEL, HERE]}, USER, {"role": "user", "content": [HERE, PIXEL, PIXEL]})
    images = chat_template.read(BodyFields(body, CONVERSATION), made, no_vision="").images
    assert [image.where for image in images] == [
        "messages[0].content[0]",
        "messages[2].content[1]",
        "messages[2].content[2]",
    ]


@pytest.mark.parametrize("role", ROLES)
def test_every_role_of_the_api_is_accepted(role: str) -> None:
    shown = "system" if role == "developer" else role
    assert prompt(said({"role": role, "content": "x"})) == f"[{shown}:x][go]"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_role_that_only_the_template_names_is_accepted(quote: str) -> None:
    text = "{% for m in messages %}{{ 'tool' if m.role == 'ipython' else '' }}{% endfor %}".replace("'", quote)
    message = {"role": "ipython", "content": "x"}
    assert prompt(said(message), template(text)) == "tool"
    with pytest.raises(InvalidValue, match="role must be one of"):
        prompt(said({"role": "", "content": "x"}), template(text))
    with pytest.raises(InvalidValue, match="or one that the model's chat template names"):
        prompt(said(message))


def test_the_developer_role_is_kept_for_templates_that_mention_it() -> None:
    text = SHOWING + "{# developer #}"
    assert prompt(said({"role": "developer", "content": "x"}), template(text)) == "[developer:x][go]"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt(said({"role": "user", "content": parts})) == "[user:one\ntwo][go]"


def test_the_time_to_read_a_chat_grows_with_its_parts_and_not_with_their_square() -> None:
    def seconds(count: int) -> float:
        """The processor's time, which other programs hardly change."""
        body = said({"role": "user", "content": [HERE] * count})
        began = time.process_time()
        chat_template.read(BodyFields(body, CONVERSATION), made)
        return time.process_time() - began

    made = template()
    assert seconds(256_000) < 10 * 16 * seconds(16_000), "33 s for a body of 8 MB, where it grew with the square"


@pytest.mark.parametrize(
    ("kind", "modality"), [("image_url", "images"), ("input_audio", "audio"), ("video_url", "video"), ("file", "files")]
)
def test_a_part_of_another_modality_is_rejected_by_name(kind: str, modality: str) -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {}}]
    with pytest.raises(UnsupportedField, match=f"not {modality}") as caught:
        prompt(said(USER, {"role": "user", "content": parts}))
    assert caught.value.param == "messages[1].content[1]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 5}], "messages[0].reasoning_content"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0]",
        ),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
def test_an_invalid_message_is_rejected_by_its_position(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prompt({"messages": messages})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_answer_that_an_official_client_returns_is_accepted() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "yes", "annotations": []}
    answer |= dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    assert prompt(said(USER, answer, USER)) == "[user:hi][assistant:yes][user:hi][go]"


def test_arguments_of_past_tool_calls_reach_the_template_as_objects() -> None:
    text = CALLS.replace("(SHOWN)", "{{ c.function.arguments['x'] + 1 }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    body = said(USER, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert prompt(body, template(text)) == "42"


@pytest.mark.parametrize("written", ["'' + c.function.arguments", "c.function.arguments"], ids=["joined", "printed"])
def test_arguments_of_past_calls_are_text_for_a_template_that_takes_text(written: str) -> None:
    made = template(CALLS.replace("(SHOWN)", "{{ " + written + " }}"))
    for arguments in ('{"x": "é"}', {"x": "é"}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = said(USER, {"role": "assistant", "content": None, "tool_calls": [call]})
        assert prompt(body, made) == '{"x": "é"}'


def test_ids_of_calls_have_nine_characters_for_a_template_that_demands_them() -> None:
    made = template(
        "{% for m in messages %}{% for id in [m.tool_call_id] if m.role == 'tool' %}{{ '=' ~ id }}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id|length != 9 %}"
        "{{ raise_exception('9!') }}{% endif %}{{ c.id ~ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
    )

    def asked(id: str) -> str:
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": ""}}
        answer = {"role": "tool", "tool_call_id": id, "content": ""}
        return prompt(said(USER, {"role": "assistant", "tool_calls": [call]}, answer), made)

    assert asked("Abcdefgh1") == "Abcdefgh1{}=Abcdefgh1", "an id of nine stays"
    first, second = asked("call_aaaaaaaaa"), asked("call_baaaaaaaaa")
    assert first != second
    for text in (first, second):
        before, after = text.split("{}=")
        assert before == after
        assert len(before) == 9
    plain = prompt(
        said(USER, {"role": "tool", "tool_call_id": "long-id-here", "content": "x"}),
        template("{{ messages[1].tool_call_id }}"),
    )
    assert plain == "long-id-here"


def test_arguments_of_past_calls_count_as_text_and_are_not_parsed_before_the_size_of_the_chat_is_checked() -> None:
    arguments = '{"a": [' + "[], " * 1000 + "1]}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    body = said(USER, {"role": "assistant", "tool_calls": [call]})
    assert chat_template.read(BodyFields(body, CONVERSATION), template()).size > len(arguments)


def test_invalid_arguments_of_past_calls_stay_strings() -> None:
    text = CALLS.replace("(SHOWN)", "{{ c.function.arguments }}")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 4'}}
    assert prompt(said(USER, {"role": "assistant", "tool_calls": [call]}), template(text)) == '{"x": 4'


def test_past_reasoning_reaches_the_template() -> None:
    text = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    assert prompt(said({"role": "assistant", "reasoning_content": "hm"}), template(text)) == "hm"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert prompt(said(USER, add_generation_prompt=False)) == "[user:hi]"


def test_a_last_message_can_be_continued() -> None:
    body = said(USER, {"role": "assistant", "content": "Once upon"}, continue_final_message=True)
    assert prompt(body) == "[user:hi][assistant:Once upon"


@pytest.mark.parametrize(
    "body",
    [
        said(USER, continue_final_message=True),
        said(USER, {"role": "assistant", "content": "a"}, continue_final_message=True, add_generation_prompt=True),
    ],
)
def test_only_a_last_message_of_the_assistant_can_be_continued(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        prompt(body)
    assert caught.value.param == "continue_final_message"


def test_variables_of_the_request_override_the_presets() -> None:
    made = template("{{ a }}{{ b }}", '{"a": 1, "b": 2}')
    assert prompt(said(USER, chat_template_kwargs={"b": 3}), made) == "13"


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "tools", "conversation", "padding"])
def test_a_variable_cannot_have_a_reserved_name(name: str) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        prompt(said(USER, chat_template_kwargs={name: 1}))
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(StartError):
        template(variables=f'{{"{name}": 1}}')


def ignored(body: dict[str, Any], text: str) -> tuple[str, tuple[str, ...]]:
    made, fields = template(text), BodyFields(body, CONVERSATION)
    rendered = made.render(chat_template.read(fields, made))
    return rendered, fields.check_unknown(strict=False)


def test_effort_and_verbosity_reach_the_template() -> None:
    for effort in ("low", "max"):
        body = said(USER, reasoning_effort=effort, verbosity="high")
        assert ignored(body, "{{ reasoning_effort }} {{ verbosity }}") == (f"{effort} high", ())


def test_an_effort_of_none_disables_thinking() -> None:
    body = said(USER, reasoning_effort="none")
    assert ignored(body, "{{ enable_thinking }}") == ("False", ())


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("{% if enable_thinking %}on{% endif %}", "enable_thinking"),
        ("{%- if not thinking is defined %}off{% elif thinking %}on{% endif %}", "thinking"),
        ("{% for m in messages %}{% if m.thinking or 'thinking' in m %}{% endif %}{% endfor %}", ""),
    ],
)
def test_reasoning_is_on_where_the_template_has_a_switch(text: str, switch: str) -> None:
    assert template(text).thinking_switch == switch
    assert prompt(said(USER), template(text)) == ("on" if switch else "")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(said(USER, **off), template(text)) == ""
    preset = template(text, '{"enable_thinking": false}')
    assert prompt(said(USER), preset) == ""
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(said(USER, **on), preset) == ("on" if switch else ""), "a request precedes the preset"


def test_a_variable_that_the_template_does_not_use_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    template("{{ messages }}", '{"enable_thinking": false}')
    assert "chat-template-kwargs: the chat template does not use enable_thinking" in caplog.text
    caplog.clear()
    template("{% if thinking %}{% endif %}", '{"enable_thinking": false}')
    assert caplog.text == ""


def test_effort_without_effect_is_reported_as_ignored() -> None:
    body = said(USER, reasoning_effort="low", verbosity="high")
    assert ignored(body, "no such thing") == ("no such thing", ("reasoning_effort", "verbosity"))


def test_an_exception_of_the_template_is_the_error_message() -> None:
    text = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidValue, match="roles must alternate") as caught:
        prompt(said(USER), template(text))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "text",
    ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ none.x.y }}", "{{ [][1] + '' }}"],
)
def test_an_error_in_the_template_is_an_error_of_the_request(text: str) -> None:
    with pytest.raises(InvalidValue):
        prompt(said(USER), template(text))


def test_deeply_nested_messages_are_rejected() -> None:
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(InvalidValue, match="nested"):
        prompt(said(USER, chat_template_kwargs={"deep": deep}))


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidValue):
        prompt(said(USER), template("{{ ''.__class__.__mro__[1].__subclasses__() }}"))


def test_a_template_that_does_not_compile_prevents_the_start() -> None:
    with pytest.raises(StartError, match="line 2") as caught:
        template("fine\n{% for %}")
    assert caught.value.exit == Exit.UNUSABLE


@pytest.mark.parametrize("variables", ["[1]", "{", "5", "null"])
def test_variables_of_the_preset_are_an_object(variables: str) -> None:
    with pytest.raises(StartError) as caught:
        template(variables=variables)
    assert caught.value.exit == Exit.USAGE


@pytest.mark.parametrize(
    "tools", [5, [5], [{"type": "function"}], [{"type": "web_search"}], [{"type": "function", "function": {"name": 1}}]]
)
def test_a_tool_is_a_named_function(tools: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        prompt(said(USER, tools=tools))
    assert str(caught.value.param).startswith("tools")


def test_a_chat_reads_exactly_the_fields_of_its_schema() -> None:
    fields = BodyFields(said(USER), CONVERSATION)
    chat_template.read(fields, template())
    assert fields.known == CONVERSATION.keys()
