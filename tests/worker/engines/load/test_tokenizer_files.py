"""Tokenizers that are stored in other files than tokenizer.json."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers.integrations.mistral import tokenizer as mistral
from transformers.models.auto import tokenization_auto

from router.memory import checkpoint
from tests import tiny
from worker.engines.transformers.load.snapshot import load_tokenizer
from worker.prompt import chat_formats
from worker.prompt.chat_template import ChatTemplate, Conversation
from worker.protocol.argv import Estimate


def write_sentencepiece(folder: Path) -> bytes:
    """Train a model of tiny.CORPUS and store it instead of tokenizer.json."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.CORPUS), model_writer=file, model_type="bpe", vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return file.getvalue()


@pytest.mark.parametrize(
    "text", ["The quick brown fox", "two  blanks and\ta tab\n\n", "na\u00efve \u4f60\u597d \U0001f98a", "1234"]
)
def test_a_sentencepiece_model_gives_the_tokens_of_its_library(tmp_path: Path, text: str) -> None:
    stored = write_sentencepiece(tiny.make("llama", tmp_path))
    tokenizer = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == sentencepiece.SentencePieceProcessor(model_proto=stored).encode(text)
    assert tokenizer.decode(tokens) == text


PAIRS = ("SYSTEM_PROMPT", "INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "THINK", "MODEL_SETTINGS")
CONTROL = (
    "<unk>", "<s>", "</s>", "<pad>", "[TOOL_CALLS]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]",
    *(f"[{slash}{name}]" for slash in ("", "/") for name in PAIRS),
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get"}}]
OFFERED = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "get"}}][/AVAILABLE_TOOLS]'
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "get", "arguments": {"x": 1}}}
MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "abcdefgh2"}]},
    {"role": "tool", "content": "7", "tool_call_id": "abcdefgh1"},
    {"role": "tool", "content": "8", "tool_call_id": "abcdefgh2"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
]
BY_LIST = (
    '[TOOL_CALLS][{"name": "get", "arguments": {"x": 1}, "id": "abcdefgh1"}, {"name": "get", "arguments": {"x": 1},'
    ' "id": "abcdefgh2"}]</s>'
)
BY_NAME = "".join(f'[TOOL_CALLS]get[CALL_ID]abcdefgh{number}[ARGS]{{"x": 1}}' for number in (1, 2)) + "</s>"
RESULTS = "".join(f"[TOOL_RESULTS]abcdefgh{id}[TOOL_CONTENT]{text}[/TOOL_RESULTS]" for id, text in ((1, 7), (2, 8)))
SETTINGS = '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]'
CALLED = (
    '[INST]hi[/INST][TOOL_CALLS]get[ARGS]{"x": 1}[TOOL_CALLS]get[ARGS]{"x": 1}</s>'
    "[TOOL_RESULTS]7[/TOOL_RESULTS][TOOL_RESULTS]8[/TOOL_RESULTS]done</s>[INST]x[/INST]"
)
CHATS = {
    "v7": f"[INST]hi[/INST]{BY_LIST}{RESULTS}done</s>{OFFERED}[INST]x[/INST]",
    "v11": f"[INST]hi[/INST]{BY_NAME}{RESULTS}done</s>{OFFERED}[INST]x[/INST]",
    "v13": f"{OFFERED}{CALLED}",
    "v15": f"{OFFERED}{SETTINGS}{CALLED}",
}
"""The text that mistral-common 1.13.1 writes for MESSAGES with TOOLS behind the system message, by version."""


def write_tekken(folder: Path, version: str = "v13") -> None:
    """Store tekken.json, with all bytes and a few words, instead of tokenizer.json and the chat template."""
    for path in (*folder.glob("tokenizer*"), folder / "chat_template.jinja"):
        path.unlink()
    words = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "version": version,
        "default_vocab_size": len(words) + len(CONTROL),
        "default_num_special_tokens": len(CONTROL),
    }
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(CONTROL)]
    stored = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(stored))


@pytest.mark.parametrize("version", CHATS)
def test_tekken_json_alone_gives_the_tokens_and_chats_of_mistrals_library(tmp_path: Path, version: str) -> None:
    write_tekken(tiny.make("mistral", tmp_path), version)
    tokenizer: Any = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    first = len(CONTROL)
    assert tokenizer.encode("the the!") == [1, first + 257, first + 258, first + ord("!")]
    chat = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert chat == f"<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT]{CHATS[version]}"
    facts = checkpoint.read(tmp_path)
    assert (facts.capabilities, facts.vocab_type) == (("chat", "completion", "tools"), 2)


@pytest.mark.parametrize("version", ["v7", "v11"])
@pytest.mark.parametrize("id", [{}, {"id": "call_0123456789"}])
def test_ids_of_calls_have_nine_characters_where_mistrals_library_writes_them(
    tmp_path: Path, version: str, id: dict[str, str]
) -> None:
    write_tekken(tiny.make("mistral", tmp_path), version)
    template = ChatTemplate(load_tokenizer(Estimate(snapshot=str(tmp_path))), text="", variables="")
    call = {"type": "function", "function": {"name": "get", "arguments": {}}, **id}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": id.get("id", "")},
    ]
    prompt = template.render(Conversation(messages=messages, variables={}))
    of_call, of_result = re.findall(r'(?:"id": "|\[CALL_ID\]|\[TOOL_RESULTS\])(\w+)', prompt)
    assert of_call == of_result
    assert len(of_call) == 9


@pytest.mark.parametrize(("version", "reasons"), [("v11", False), ("v13", True)])
def test_reasoning_has_tokens_from_version_13_on(tmp_path: Path, version: str, reasons: bool) -> None:
    write_tekken(tiny.make("mistral", tmp_path), version)
    tokenizer: Any = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    chat_format = chat_formats.find(tokenizer.chat_template, None)
    assert chat_format is not None
    assert chat_format.has_reasoning == reasons
    answer = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}, answer], tokenize=False)
    assert chat == f"<s>[INST]hi[/INST]{'[THINK]b[/THINK]' if reasons else ''}a</s>"


@pytest.mark.parametrize("version", ["v3", "new"])
def test_tekken_json_of_a_version_without_a_known_chat_has_no_template(tmp_path: Path, version: str) -> None:
    write_tekken(tiny.make("mistral", tmp_path), version)
    assert not load_tokenizer(Estimate(snapshot=str(tmp_path))).chat_template
    assert checkpoint.read(tmp_path).capabilities == ("completion",)


@pytest.mark.parametrize(("asked", "stated"), [("none", "none"), ("high", "high"), ("medium", "high")])
def test_the_effort_of_a_request_is_one_that_the_model_of_tekken_json_knows(
    tmp_path: Path, asked: str, stated: str
) -> None:
    write_tekken(tiny.make("mistral", tmp_path), "v15")
    tokenizer: Any = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    chat = tokenizer.apply_chat_template(MESSAGES[1:2], reasoning_effort=asked, tokenize=False)
    assert chat == f"<s>{SETTINGS.replace('none', stated)}[INST]hi[/INST]"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_chat_template_beside_tekken_json_takes_precedence(tmp_path: Path, name: str) -> None:
    write_tekken(tiny.make("mistral", tmp_path))
    text = "{{ messages[0]['content'] }}"
    (tmp_path / name).write_text(text if name.endswith("jinja") else json.dumps({"chat_template": text}))
    template: Any = load_tokenizer(Estimate(snapshot=str(tmp_path))).chat_template
    assert template == text
    assert checkpoint.read(tmp_path).capabilities == ("chat", "completion")


def test_mistral_common_does_not_replace_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers prefers it where it is installed, and its tokenizer has neither tokens of bytes nor a template."""
    monkeypatch.setattr(mistral, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    folder = tiny.make("mistral", tmp_path)
    (folder / "tekken.json").write_text("{}")
    tokenizer = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    assert tokenizer.decode(tokenizer.encode("the")) == "<s>the"
