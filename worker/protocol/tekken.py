"""Chats of Mistral models whose only tokenizer file is tekken.json.

Their repositories have no chat template, because Mistral's own library, mistral-common, writes the chats. Their form
depends on the version of the tokenizer. Repositories with versions before 7 have a tokenizer.json as well.
"""

import json
from pathlib import Path

TEKKEN = "tekken.json"
_OLDEST = 7
_NAMES_CALLS = 11  # from this version on, a call is a name and its arguments, no object in a list
# From this version on, calls have no ids, tools precede the first message of the user, and there is reasoning.
_HAS_NO_IDS = 13
_HAS_SETTINGS = 15  # from this version on, settings of the model precede the first message of the user

_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for part in content or [] -%}{{ part['text'] }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set state = namespace(questions=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        [SYSTEM_PROMPT]{{ text(message['content']) }}[/SYSTEM_PROMPT]
    {%- elif message['role'] == 'user' -%}
        {%- set state.questions = state.questions + 1 -%}
        {%- if tools and state.questions == (questions | length if has_ids else 1) -%}
            [AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
        {%- endif -%}
        SETTINGS
        [INST]{{ text(message['content']) }}[/INST]
    {%- elif message['role'] == 'assistant' -%}
        REASONING
        {{- text(message['content']) -}}
        {%- set calls = message['tool_calls'] or [] -%}
        {%- for call in calls if has_ids and (call['id'] or '') | length != 9 -%}
            {{ raise_exception('the id of a tool call needs nine characters') }}
        {%- endfor -%}
        CALLS
        {{- eos_token -}}
    {%- elif message['role'] == 'tool' -%}
        [TOOL_RESULTS]
        {%- if has_ids -%}{{ message['tool_call_id'] }}[TOOL_CONTENT]{%- endif -%}
        {{- text(message['content']) -}}[/TOOL_RESULTS]
    {%- endif -%}
{%- endfor -%}
"""
_REASONING = """\
        {%- if message['reasoning_content'] -%}[THINK]{{ message['reasoning_content'] }}[/THINK]{%- endif -%}"""
_LIST_OF_CALLS = """\
        {%- for call in calls -%}
            {{ '[TOOL_CALLS][' if loop.first -}}
            {"name": {{ call['function']['name'] | tojson -}}
            , "arguments": {{ call['function']['arguments'] | tojson -}}
            , "id": {{ call['id'] | tojson }}}{{ ']' if loop.last else ', ' }}
        {%- endfor -%}"""
_NAMED_CALLS = """\
        {%- for call in calls -%}
            [TOOL_CALLS]{{ call['function']['name'] }}
            {%- if has_ids -%}[CALL_ID]{{ call['id'] }}{%- endif -%}
            [ARGS]{{ call['function']['arguments'] | tojson }}
        {%- endfor -%}"""
# The model knows the efforts "none" and "high" only.
_SETTINGS = """\
        {%- if state.questions == 1 -%}
            [MODEL_SETTINGS]{"reasoning_effort": "
            {{- 'high' if reasoning_effort and reasoning_effort != 'none' else 'none' -}}
            "}[/MODEL_SETTINGS]
        {%- endif -%}"""


def is_alone(folder: Path) -> bool:
    """True if tekken.json is the only tokenizer file in `folder`."""
    others = ("tokenizer.json", "tokenizer.model")
    return (folder / TEKKEN).is_file() and not any((folder / name).is_file() for name in others)


def chat_template(folder: Path) -> str:
    """Return the template that writes chats as mistral-common does; empty if tekken.json is damaged or of a version
    before 7."""
    try:
        config = json.loads((folder / TEKKEN).read_bytes())["config"]
        version = int(str(config["version"]).removeprefix("v"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if version < _OLDEST:
        return ""
    has_ids = version < _HAS_NO_IDS
    calls = _NAMED_CALLS if version >= _NAMES_CALLS else _LIST_OF_CALLS
    template = _TEMPLATE.replace("        CALLS", calls).replace("        REASONING", "" if has_ids else _REASONING)
    template = template.replace("        SETTINGS", _SETTINGS if version >= _HAS_SETTINGS else "")
    return f"{{%- set has_ids = {str(has_ids).lower()} -%}}\n{template}"
