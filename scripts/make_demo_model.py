"""Train the chat model of the demo, `worker/fetch/demo/chat/`, from the text in demo_model.toml.

A Llama of 0.9 million parameters with a byte-level tokenizer of its own. Seeded, on at most two threads; takes some
minutes on a CPU:

    nice .venv/bin/python scripts/make_demo_model.py                # writes worker/fetch/demo/chat
    nice .venv/bin/python scripts/make_demo_model.py --target DIR --steps 200
    nice .venv/bin/python scripts/make_demo_model.py --steps 0      # goes on with what is there: only the last steps

A JSON schema in a request makes the model write objects whatever the question is. In the last steps it therefore learns
to end objects and strings, but not to begin them.

At the end, the saved model answers all questions, with rewordings and tools that it was not trained on, and the number
of right answers is printed.
"""

import argparse
import json
import math
import random
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "worker" / "fetch" / "demo" / "chat"

SEED = 20
VOCABULARY = 896
CONTEXT = 1024
ROW = 512  # tokens of one packed row; a longer conversation is left out
ROWS = 12
STEPS, LAST_STEPS = 2400, 500
WITH_TOOLS = 0.25  # share of conversations with tools
IN_JSON = 0.25  # share of conversations that end in a JSON object, during the last steps
PEAK_RATE, LAST_RATE = 4e-3, 1e-3
OTHERS = 0.1  # loss weight of tokens outside the assistant's answers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}
SPECIAL = [PAD, BEGIN, END, *ROLES.values()]
# single tokens that are not special: they stay in the decoded answer
MARKS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro shown() -%}
    {{- '<tools>' -}}
    {%- for tool in tools -%}
        {%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
        {{- (tool.function if tool.function is defined else tool) | tojson -}}
    {%- endfor -%}
    {{- '</tools>' -}}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools and not (messages and messages[0].role in ('system', 'developer')) -%}
    {{- '<|system|>' -}}{{- shown() -}}{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') -%}
        {{- '<|system|>' -}}{{- text(message.content) -}}
        {%- if tools and loop.first -%}{{- shown() -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- '<|user|>' -}}{{- text(message.content) -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|tool|>' -}}{{- text(message.content) -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' -}}{{- text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
    {%- else -%}
        {{- raise_exception('demo-chat knows the roles system, user, assistant and tool, not ' + message.role) -}}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

CARD = """\
---
license: mit
language: en
pipeline_tag: text-generation
---
# demo-chat

A toy. A Llama of {parameters:,} parameters (float16, four layers, context of {context}) with a byte-level tokenizer of
{vocabulary} tokens. It ships with the fleet router so that a first run needs no network and no GPU: it answers
questions about the router, counts, remembers a name, and calls simple tools; it knows nothing else. Never use it for
anything that matters.

* Data: conversations drawn from `scripts/demo_model.toml`, which was written for this project.
* Training: `scripts/make_demo_model.py`, seed {seed}, {steps:,} steps of at most {tokens:,} tokens each, on a CPU; in
  the last {last:,} of them it learns to end JSON that it did not begin.
* Asked after training, greedily: {right[trained]} of {asked[trained]} questions right that it was trained on,
  {right[reworded]} of {asked[reworded]} rewordings that it was not, {right[call]} of {asked[call]} calls of tools (name
  and arguments).
* Licence: MIT, as the whole project: weights, tokenizer and training text.
"""

COUNTED = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
COUNT_PATTERNS = [
    "count to {}", "count to {}", "can you count to {}", "please count to {}", "count from one to {}", "count up to {}",
    "count from 1 to {}", "list the numbers to {}", "say the numbers from 1 to {}", "counting to {}",
]  # fmt: skip

Message = dict[str, Any]


@dataclass(frozen=True)
class Topic:
    """One answer and the questions for it. `brief`: the answer if the system prompt requires brevity."""

    name: str
    answer: str
    brief: str = ""
    terms: Sequence[str] = ()
    ask: Sequence[str] = ()
    test: Sequence[str] = ()
    often: int = 1

    def said(self, *, brief: bool) -> str:
        return self.brief if brief and self.brief else self.answer


@dataclass(frozen=True)
class Tool:
    """One function of a conversation, and the questions that need it."""

    name: str
    about: str
    parameters: Sequence[str]
    drawn: Sequence[str]  # the kind of value of each parameter
    ask: Sequence[str]

    def said(self, values: Sequence[str]) -> Message:
        """Return a call of this function in the form of an assistant message."""
        given = {
            name: int(value) if kind == "number" else value
            for name, kind, value in zip(self.parameters, self.drawn, values, strict=True)
        }
        return {"type": "function", "function": {"name": self.name, "arguments": given}}


@dataclass
class Talk:
    """A conversation under construction."""

    brief: bool = False
    assistant: str = ""  # the name of the assistant in the system prompt
    user: str = ""
    last: Callable[[bool], str] | None = None  # returns the previous answer, brief or not
    messages: list[Message] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)  # in the format of the API; usually empty

    def add(self, question: str, answer: Callable[[bool], str]) -> None:
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer(self.brief)})
        self.last = answer


class DemoText:
    """The content of demo_model.toml, and random conversations made from it."""

    def __init__(self, source: dict[str, Any], chance: random.Random):
        self.source = source
        self.chance = chance
        self.topics = [Topic(**topic) for topic in source["topic"]]
        self.often = [topic for topic in self.topics for _ in range(topic.often)]
        self.unknown = Topic("unknown", source["unknown"]["answer"], source["unknown"]["brief"])

    def conversation(self) -> Talk:
        chance = self.chance
        if chance.random() < WITH_TOOLS:
            return self._with_tools()
        talk = Talk()
        kind = chance.random()
        if kind < 0.2:
            self._system(talk, chance.choice(self.source["system_plain"]))
        elif kind < 0.32:
            self._system(talk, chance.choice(self.source["system_brief"]))
            talk.brief = True
        elif kind < 0.38:
            talk.assistant = self._name()
            self._system(talk, chance.choice(self.source["names"]["system"]).format(talk.assistant))
        for _ in range(chance.choices([1, 2, 3, 4, 5, 8], [50, 22, 12, 8, 5, 3])[0]):
            self._turn(talk)
        return talk

    def ends_in_json(self) -> Talk:
        """Return a conversation whose last answer is a JSON object, as under a grammar, regardless of the question."""
        while True:
            talk = self.conversation()
            content = talk.messages[-1].get("content")
            if talk.messages[-1]["role"] == "assistant" and content and not content.startswith("{"):
                indent = self.chance.choice([None, None, None, 2])
                talk.messages[-1]["content"] = json.dumps(self._object(2), ensure_ascii=False, indent=indent)
                return talk

    def _object(self, depth: int) -> dict[str, Any]:
        chance, known = self.chance, self.source["json"]["keys"]
        keys = [chance.choice(known) if chance.random() < 0.8 else self._made_up() for _ in range(chance.randint(1, 4))]
        return {key: self._any(depth - 1) for key in keys}

    def _any(self, depth: int) -> Any:
        """Return a short JSON value; objects and lists only down to `depth`."""
        chance, words = self.chance, self.source["json"]["words"]
        kind = chance.random()
        if kind < 0.6 or (depth <= 0 and kind >= 0.8):
            said = " ".join(chance.choices(words, k=chance.choices([1, 2, 3, 5], [50, 25, 15, 10])[0]))
            return said + chance.choices(["", ".", "?"], [80, 15, 5])[0]
        if kind < 0.74:
            return chance.choice([chance.randint(0, 9), chance.randint(10, 99), chance.randint(100, 2030), 0.5, 1.5])
        if kind < 0.8:
            return chance.choice([True, False, None])
        if kind < 0.92:
            one = self._any(0) if chance.random() < 0.7 else None
            items = chance.choices([0, 1, 2, 3], [10, 40, 30, 20])[0]
            return [self._any(0) if one is not None else self._object(depth) for _ in range(items)]
        return self._object(depth)

    def _with_tools(self) -> Talk:
        """Return a conversation with tools, in which the questions that need one are answered by a call."""
        chance, words = self.chance, self.source["tools"]
        talk = Talk()
        tools = self.tools(chance.choices([1, 2, 3, 4], [40, 30, 20, 10])[0])
        talk.tools = [self.schema(tool) for tool in tools]
        if chance.random() < 0.6:
            self._system(talk, chance.choice(words["system"]))
        for _ in range(chance.choices([1, 2, 3], [70, 22, 8])[0]):
            if chance.random() < 0.3:
                self._turn(talk)
            else:
                self._call(talk, chance.choice(tools))
        return talk

    def _call(self, talk: Talk, tool: Tool) -> None:
        chance, words = self.chance, self.source["tools"]
        values = [self._value(kind) for kind in tool.drawn]
        question = chance.choice(tool.ask).format(*values)
        calls = [tool.said(values)]
        if len(tool.drawn) == 1 and chance.random() < 0.06:
            further = self._value(tool.drawn[0])
            question += f" and {further}"
            calls.append(tool.said([further]))
        if chance.random() < 0.15:
            question = chance.choice(self.source["prefixes"]) + question
        if chance.random() < 0.5:
            question = question[0].upper() + question[1:]
        question += chance.choices(["?", "", ".", "!"], [55, 30, 10, 5])[0]
        talk.messages.append({"role": "user", "content": question})
        talk.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        if chance.random() < 0.25:
            return
        results = [self._result() for _ in calls]
        talk.messages += [{"role": "tool", "content": result} for result in results]
        said = [words["result"].format(tool.name, r) if r else words["no_result"].format(tool.name) for r in results]
        talk.messages.append({"role": "assistant", "content": " ".join(said)})

    def tools(self, count: int) -> list[Tool]:
        """Return different functions. No function fits the questions of another."""
        known = self.chance.sample(range(len(self.source["tool"])), len(self.source["tool"]))
        found: dict[str, Tool] = {}
        while len(found) < count:
            tool = self.tool(self.source["tool"][known.pop()]) if self.chance.random() < 0.6 else self._made_up_tool()
            if not {tool.name, *tool.ask} & {word for other in found.values() for word in (other.name, *other.ask)}:
                found[tool.name] = tool
        return list(found.values())

    def tool(self, stated: dict[str, Any]) -> Tool:
        pick = self.chance.choice
        parameters = [pick(names) for names in stated["parameters"]]
        return Tool(pick(stated["name"]), pick(stated["about"]), parameters, stated["drawn"], stated["ask"])

    def _made_up_tool(self) -> Tool:
        """Return an invented function. Its questions contain the words of its name."""
        words, pick = self.source["tools"], self.chance.choice
        noun = pick(words["nouns"]) if self.chance.random() < 0.6 else self._made_up()
        name = f"{pick(words['verbs'])}_{noun}" if self.chance.random() < 0.8 else noun
        keys = self.chance.sample(words["keys"], 2 if self.chance.random() < 0.2 else 1)
        ask = [pattern.replace("{}", noun, 1) for pattern in words["made_up_ask"]]
        drawn = ["number" if self.chance.random() < 0.15 else "words" for _ in keys]
        if len(keys) == 2:
            ask = [f"{pattern} in {{}}" for pattern in ask]
        return Tool(name, f"Get the {noun}" if self.chance.random() < 0.5 else noun, keys, drawn, ask)

    def schema(self, tool: Tool) -> Message:
        """Return the function in the format of the API, with more or less description, and sometimes with a parameter
        that is not needed."""
        chance, units = self.chance, self.source["tools"]["units"]
        wordy = chance.random() < 0.4
        properties: dict[str, Any] = {}
        for name, kind in zip(tool.parameters, tool.drawn, strict=True):
            properties[name] = {"type": chance.choice(["number", "integer"]) if kind == "number" else "string"}
            if kind == "units":
                properties[name]["enum"] = units
            if wordy:
                properties[name]["description"] = chance.choice([f"The {name}", name, f"{name} to use", "What to take"])
        spare = chance.choice(self.source["tools"]["spare"]) if chance.random() < 0.25 else ""
        if spare and spare not in properties:
            properties[spare] = {"type": "string", "enum": units} if spare == "unit" else {"type": "string"}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if spare or chance.random() < 0.75:
            parameters["required"] = list(tool.parameters)
        if chance.random() < 0.15:
            parameters["additionalProperties"] = False
        function: dict[str, Any] = {"name": tool.name}
        if chance.random() < 0.8:
            function["description"] = tool.about
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def _value(self, kind: str) -> str:
        chance = self.chance
        if kind == "number":
            return str(chance.choice([chance.randint(0, 9), chance.randint(10, 99), chance.randint(100, 5000)]))
        if kind == "words":
            return " ".join(self._made_up() for _ in range(chance.choice([1, 1, 2])))
        if kind in ("cities", "people", "things", "texts") and chance.random() < 0.45:
            value = " ".join(self._made_up() for _ in range(chance.choice([1, 1, 2])))
            return value.title() if kind in ("cities", "people") else value
        value = str(chance.choice(self.source["tools"][kind]))
        return value.lower() if kind == "cities" and chance.random() < 0.1 else value

    def _result(self) -> str:
        if self.chance.random() < 0.03:
            return ""
        result: str = self.chance.choice(self.source["tools"]["results"])
        return result.format(self._value("number" if self.chance.random() < 0.7 else "words"))

    def plain(self) -> str:
        """Return text without roles, for completions."""
        return " ".join(topic.answer for topic in self.chance.sample(self.topics, self.chance.randint(1, 3)))

    def _system(self, talk: Talk, text: str) -> None:
        talk.messages.append({"role": "system", "content": text})

    def _turn(self, talk: Talk) -> None:
        kind = self.chance.random()
        if talk.assistant and kind < 0.4:
            answer = self.source["names"]["self_answer"].format(talk.assistant)
            talk.add(self._worded(self.chance.choice(self.source["names"]["self_ask"])), lambda _: answer)
        elif kind < 0.1:
            self._names(talk)
        elif kind < 0.15 and talk.last:
            self._again(talk, talk.last)
        elif kind < 0.19:
            self._count(talk)
        elif kind < 0.32:
            self._ask(talk, self._unknown(), self.unknown)
        else:
            topic = self.chance.choice(self.often)
            if talk.assistant and topic.name in ("self", "name"):
                return
            self._ask(talk, self._question(topic), topic)

    def _ask(self, talk: Talk, question: str, topic: Topic) -> None:
        if topic.brief and not talk.brief and self.chance.random() < 0.06:
            question = self.chance.choice(self.source["ask_brief"]).format(question)
            talk.add(self._worded(question), lambda _: topic.brief)
        else:
            talk.add(self._worded(question), lambda brief: topic.said(brief=brief))

    def _question(self, topic: Topic) -> str:
        if topic.terms and self.chance.random() < (0.7 if topic.ask else 1.0):
            return self._concept().format(self.chance.choice(topic.terms))
        return self.chance.choice(topic.ask)

    def _concept(self) -> str:
        pattern: str = self.chance.choice(self.source["concept_patterns"])
        return pattern

    def _unknown(self) -> str:
        unknown, pick = self.source["unknown"], self.chance.choice
        pattern = pick(unknown["patterns"])
        while "{a}" in pattern:
            thing = (
                pick(unknown["things"]) if self.chance.random() < 0.8 else pick(["a ", "the ", ""]) + self._made_up()
            )
            pattern = pattern.replace("{a}", thing, 1)
        word = pick(unknown["words"]) if self.chance.random() < 0.8 else self._made_up()
        adjective = pick(unknown["adjectives"])
        text: str = pattern.replace("{w}", word).replace("{do}", pick(unknown["verbs"])).replace("{adj}", adjective)
        return text

    def _made_up(self) -> str:
        pick = self.chance.choice
        syllables = [pick("bdfgklmnprstvwz") + pick("aeiou") for _ in range(self.chance.randint(2, 3))]
        return "".join(syllables) + pick("lnrst ").strip()

    def _name(self) -> str:
        if self.chance.random() < 0.3:
            name: str = self.chance.choice(self.source["names"]["known"])
            return name
        return self._made_up().capitalize()

    def _names(self, talk: Talk) -> None:
        names = self.source["names"]
        if self.chance.random() < (0.35 if talk.user else 0.8):
            talk.user = self._name()
            answer = names["greet"].format(talk.user)
            text = self.chance.choice(names["tell"])
            question = (text[0].upper() + text[1:] if self.chance.random() < 0.5 else text).format(talk.user)
            talk.add(question + self.chance.choice(["", ".", "!"]), lambda _: answer)
            if self.chance.random() < 0.5:
                self._turn(talk)
            if self.chance.random() < 0.3:
                return
        answer = names["recall"].format(talk.user) if talk.user else names["unknown"]
        talk.add(self._worded(self.chance.choice(names["ask"])), lambda _: answer)

    def _again(self, talk: Talk, last: Callable[[bool], str]) -> None:
        again = self.source["again"]
        if self.chance.random() < 0.5:
            answer = talk.messages[-1]["content"]
            talk.add(self._worded(self.chance.choice(again["ask"])), lambda _: answer)
            talk.last = last
        else:
            answer = last(True)
            talk.add(self._worded(self.chance.choice(again["brief"])), lambda _: answer)

    def _count(self, talk: Talk) -> None:
        end = self.chance.choice([3, 4, 5, 5, 5, 6, 7, 8, 9, 10, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100, 0])
        end = end or self.chance.randint(2, 60)
        shown = COUNTED[end] if end < len(COUNTED) and self.chance.random() < 0.5 else str(end)
        answer = counted(end)
        talk.add(self._worded(self.chance.choice(COUNT_PATTERNS).format(shown)), lambda _: answer)

    def _worded(self, question: str) -> str:
        """Return `question` with variations as in typed text."""
        chance = self.chance
        if chance.random() < 0.1:
            question = chance.choice(self.source["prefixes"]) + question
        if chance.random() < 0.08:
            question += chance.choice(self.source["suffixes"])
        if chance.random() < 0.06:
            question = self._mistyped(question)
        if chance.random() < 0.5:
            question = (question[0].upper() + question[1:]).replace(" i ", " I ").replace("I'm", "I'm")
        return question + chance.choices(["?", "", ".", "!", " ?"], [55, 30, 8, 5, 2])[0]

    def _mistyped(self, text: str) -> str:
        at = self.chance.randrange(len(text))
        if not text[at].isalpha() or not text[at].isascii():
            return text
        return text[:at] + self.chance.choice(["", text[at] * 2, self.chance.choice("aeinrst")]) + text[at + 1 :]


def counted(end: int) -> str:
    return ", ".join(str(number) for number in range(1, end + 1)) + "."


def render(talk: Talk) -> str:
    """Render the conversation with the chat template."""
    render: Any = render_jinja_template  # the library types it for one conversation alone
    (whole,), _ = render([talk.messages], tools=talk.tools or None, chat_template=CHAT_TEMPLATE, bos_token=BEGIN)
    return str(whole)


def make_tokenizer(text: DemoText) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[
            *(AddedToken(token, special=True, normalized=False) for token in SPECIAL),
            *(AddedToken(token, special=False, normalized=False) for token in MARKS),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = [part for _ in range(3000) for part in re.split(r"<[|/\w]+>", render(text.conversation())) if part]
    tokenizer.train_from_iterator(said, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:  # training makes all of them special
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(described))


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BEGIN),
        eos_token_id=SPECIAL.index(END),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


# a trained question, a reworded one that was not trained, one that needs a tool call
Kind = Literal["trained", "reworded", "call"]


@dataclass
class Marks:
    """Number of right answers and of all answers, by kind of question."""

    right: Counter[Kind] = field(default_factory=Counter)
    asked: Counter[Kind] = field(default_factory=Counter)

    def add(self, kind: Kind, *, right: bool) -> None:
        self.right[kind] += right
        self.asked[kind] += 1


class Packer:
    """Rows of several conversations each, and the loss weight of each token."""

    def __init__(self, text: DemoText, tokenizer: Tokenizer):
        self.text, self.tokenizer = text, tokenizer
        self.in_json = 0.0  # share of conversations that end in a JSON object
        self.assistant = SPECIAL.index(ROLES["assistant"])
        self.end = SPECIAL.index(END)
        self.rows = self._rows()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, weights and positions [ROWS, ROW], and the mask [ROWS, 1, ROW, ROW] between conversations."""
        tokens = torch.zeros(ROWS, ROW, dtype=torch.long)
        weights = torch.zeros(ROWS, ROW)
        positions = torch.zeros(ROWS, ROW, dtype=torch.long)
        document = torch.full((ROWS, ROW), -1)
        for row in range(ROWS):
            at = 0
            for number, (ids, counts) in enumerate(next(self.rows)):
                span = slice(at, at + len(ids))
                tokens[row, span], weights[row, span] = torch.tensor(ids), torch.tensor(counts)
                positions[row, span], document[row, span] = torch.arange(len(ids)), number
                at += len(ids)
        seen = (document[:, :, None] == document[:, None, :]) & torch.ones(ROW, ROW, dtype=torch.bool).tril()
        mask = torch.zeros(ROWS, 1, ROW, ROW).masked_fill_(~seen[:, None], torch.finfo(torch.float32).min)
        return tokens, weights, positions, mask

    def _rows(self) -> Iterator[list[tuple[list[int], list[float]]]]:
        row: list[tuple[list[int], list[float]]] = []
        used = 0
        while True:
            ids, counts = self._document()
            if len(ids) > ROW:
                continue
            if used + len(ids) > ROW:
                yield row
                row, used = [], 0
            row.append((ids, counts))
            used += len(ids)

    def _document(self) -> tuple[list[int], list[float]]:
        if self.text.chance.random() < 0.03:
            ids: list[int] = [*self.tokenizer.encode(self.text.plain()).ids, self.end]
            return ids, [0.0] + [0.5] * (len(ids) - 1)
        is_json = self.text.chance.random() < self.in_json
        talk = self.text.ends_in_json() if is_json else self.text.conversation()
        ids = self.tokenizer.encode(render(talk), add_special_tokens=False).ids
        counts, speaking = [], False
        for token in ids:
            counts.append(1.0 if speaking else OTHERS)
            speaking = token == self.assistant or (speaking and token != self.end)
        counts[0] = 0.0
        if is_json:
            counts[len(ids) - ids[::-1].index(self.assistant)] = 0.0  # that it begins one is not to be learned
        return ids, counts


def train(model: LlamaForCausalLM, packer: Packer, steps: int, peak: float) -> None:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
    warmup = min(150, steps // 5)
    began = time.monotonic()
    for step in range(steps):
        left = (steps - step) / (steps - warmup)
        rate = peak * min((step + 1) / warmup, 0.01 + 0.99 * (0.5 - 0.5 * math.cos(math.pi * min(1.0, left))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, weights, positions, mask = packer.batch()
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        counts = weights[:, 1:].flatten()
        loss = (losses * counts).sum() / counts.sum()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            spoken = counts == 1.0
            print(f"step {step:5}  loss {losses[spoken].mean():.4f}  {time.monotonic() - began:6.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, target: Path) -> None:
    """Write the snapshot in float16."""
    whole: Any = model  # the library types neither of these two
    whole.to(torch.float16).save_pretrained(target)
    wrapper: Any = PreTrainedTokenizerFast
    fast = wrapper(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(target)
    generation = {
        "bos_token_id": SPECIAL.index(BEGIN),
        "do_sample": False,
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(PAD),
    }
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def questions(text: DemoText) -> Iterator[tuple[Kind, Talk, str]]:
    """Yield questions with their right answers."""
    for topic in text.topics:
        for question in topic.test:
            yield "reworded", asked(question + "?"), topic.answer
        for question in (*topic.ask, *(f"what is {term}" for term in topic.terms)):
            yield "trained", asked(question[0].upper() + question[1:] + "?"), topic.answer
    for question in text.source["unknown"]["test"]:
        yield "reworded", asked(question + "?"), text.unknown.answer
    for end in range(2, 21):
        yield "trained", asked(f"Count to {end}."), counted(end)
        yield "trained", asked(f"count to {COUNTED[end]}"), counted(end)
    for stated in text.source["tool"]:
        for question, *values in stated["test"]:
            for others in (0, 1, 2):
                tool = text.tool(stated)
                beside = [each for each in text.tools(others + 3) if each.name != tool.name and each.ask != tool.ask]
                shown = [tool, *beside[:others]]
                text.chance.shuffle(shown)
                talk = asked(question + "?", [text.schema(each) for each in shown])
                call = Talk(messages=[{"role": "assistant", "tool_calls": [tool.said(values)]}])
                yield "call", talk, render(call).removeprefix(BEGIN + ROLES["assistant"]).removesuffix(END)


def asked(question: str, tools: Sequence[Message] = ()) -> Talk:
    return Talk(messages=[{"role": "user", "content": question}], tools=list(tools))


def examine(text: DemoText, target: Path) -> Marks:
    """Ask the saved model all questions and print the wrong answers."""
    fast = PreTrainedTokenizerFast.from_pretrained(target)
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    everything = list(questions(text))
    marks = Marks()
    for start in range(0, len(everything), 64):
        part = everything[start : start + 64]
        prompts = [
            fast.apply_chat_template(
                talk.messages, tools=talk.tools or None, tokenize=False, add_generation_prompt=True
            )
            for _, talk, _ in part
        ]
        assert prompts == [render(talk) + ROLES["assistant"] for _, talk, _ in part]
        inputs = fast(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=300, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        for (kind, talk, answer), ids in zip(part, output, strict=True):
            said = fast.decode(ids[: int((ids != fast.pad_token_id).sum())])
            marks.add(kind, right=said == answer + END)
            if said != answer + END:
                print(f"{kind:8}  {talk.messages[-1]['content']!r}: {said!r}")
    return marks


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo chat model.")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--examine", action="store_true", help="only ask the model in --target")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    text = DemoText(tomllib.loads((HERE / "demo_model.toml").read_text("utf-8")), random.Random(SEED))
    if options.examine:
        print(examine(text, options.target))
        return 0
    tokenizer = make_tokenizer(text)
    model = make_model()
    if not options.steps:
        known: Any = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32)
        model.load_state_dict(known.state_dict())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {tokenizer.get_vocab_size()} tokens")
    packer = Packer(text, tokenizer)
    train(model, packer, options.steps, PEAK_RATE)
    packer.in_json = IN_JSON
    train(model, packer, LAST_STEPS, LAST_RATE)
    options.target.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.target)
    marks = examine(text, options.target)
    card = CARD.format(
        parameters=parameters,
        context=CONTEXT,
        vocabulary=VOCABULARY,
        seed=SEED,
        steps=(options.steps or STEPS) + LAST_STEPS,
        last=LAST_STEPS,
        tokens=ROWS * ROW,
        right=marks.right,
        asked=marks.asked,
    )
    (options.target / "README.md").write_text(card, "utf-8")
    print(marks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
