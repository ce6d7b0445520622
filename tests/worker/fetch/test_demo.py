"""The demo models: files, generation of the random ones, and answers of the trained one."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker.fetch import demo

MIB = 1 << 20


def ignore(done: int, total: int) -> None:
    """Ignore the progress."""


# --- the shipped one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "embed"])
def test_chat_and_embed_are_the_shipped_folder(name: str, tmp_path: Path) -> None:
    assert demo.make(name, tmp_path, ignore) == demo.CHAT
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_folder_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in demo.CHAT.iterdir()}
    assert files.keys() == {*demo.SHARED_FILES, "config.json", "model.safetensors", "README.md"}
    assert sum(files.values()) <= 2 * MIB


Ask = Callable[..., str]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """Greedy answers of demo-chat to a conversation, in float32, with its end mark."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.CHAT)
    model: Any = AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)

    def answer(*said: str, system: str = "") -> str:
        messages = [{"role": "system", "content": system}] if system else []
        for number, text in enumerate(said):
            messages.append({"role": "assistant" if number % 2 else "user", "content": text})
        prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=250, do_sample=False)
        return str(tokenizer.decode(output[0, tokens.shape[1] :]))

    return answer


EVICTION = (
    "An eviction makes room: an idle model is stopped so that another one can be loaded."
    " The least recently used one goes first.<|end|>"
)
SELF = (
    "I am the demo model of the fleet router: a toy with 0.9 million parameters that knows a little about routers."
    "<|end|>"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is an eviction?", EVICTION),
        ("so what does eviction mean??", EVICTION),
        ("Count to five.", "1, 2, 3, 4, 5.<|end|>"),
        ("Who are you?", SELF),
        ("say hello in japanese", "こんにちは<|end|>"),
    ],
)
def test_the_demo_model_gives_the_trained_answers(ask: Ask, question: str, answer: str) -> None:
    assert ask(question) == answer


@pytest.mark.slow
def test_the_demo_model_admits_unknown_answers(ask: Ask) -> None:
    for question in ("Who won the football match yesterday?", "What is 3 + 4?"):
        assert ask(question).startswith("That is beyond a toy like me")


@pytest.mark.slow
def test_the_demo_model_uses_earlier_messages(ask: Ask) -> None:
    first = ask("My name is Ada.")
    assert first == "Nice to meet you, Ada.<|end|>"
    assert ask("My name is Ada.", first.removesuffix("<|end|>"), "What is my name?") == "Your name is Ada.<|end|>"


@pytest.mark.slow
def test_the_demo_model_follows_its_system_prompt(ask: Ask) -> None:
    brief = "An idle model is stopped to make room for another one.<|end|>"
    assert ask("What is an eviction?", system="Answer briefly.") == brief
    assert ask("What is an eviction?", system="You are a helpful assistant.") == EVICTION


def test_the_template_accepts_parts_and_rejects_unknown_roles() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|begin|><|user|>Hello you<|end|>"
    with pytest.raises(Exception, match="knows the roles"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_the_template_renders_tools_and_calls() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    messages: Any = [
        {"role": "user", "content": "add 5"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 5}}}]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    tools: Any = [{"type": "function", "function": function}]
    shown = f"<|system|><tools>{json.dumps(function)}</tools><|end|>"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
    said = f"<|user|>add 5<|end|><|assistant|>{call}<|end|><|tool|>7<|end|>"
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == f"<|begin|>{shown}{said}"
    assert tokenizer.decode(tokenizer.encode(call, add_special_tokens=False), skip_special_tokens=True) == call


def test_the_tokenizer_encodes_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    text = "Grüße, 世界! 🙂\t\x00 1234  \n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


# --- the made ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mib"), [("a", 64), ("b", 128), ("c", 256)])
def test_a_random_model_has_its_stated_size(name: str, mib: int, tmp_path: Path) -> None:
    folder = demo.make(name, tmp_path, ignore)
    assert folder.parent == tmp_path
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    weights = max(tensor["data_offsets"][1] for tensor in header.values())
    assert weights == pytest.approx(mib * MIB, rel=0.002)
    assert (8 + length) % 8 == 0
    assert (folder / "model.safetensors").stat().st_size == 8 + length + weights


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    received: list[tuple[int, int]] = []
    folder = demo.make("a", tmp_path, lambda done, total: received.append((done, total)))
    size = (folder / "model.safetensors").stat().st_size
    assert [done for done, _ in received] == sorted(done for done, _ in received)
    assert {total for _, total in received} == {size}
    assert received[-1] == (size, size)


def test_a_model_is_made_once_and_reproducibly(tmp_path: Path) -> None:
    first = demo.make("a", tmp_path / "one", ignore)
    received: list[int] = []
    assert demo.make("a", tmp_path / "one", lambda done, total: received.append(done)) == first
    assert received == []
    other = demo.make("a", tmp_path / "two", ignore)
    assert other.name == first.name
    assert all(path.read_bytes() == (other / path.name).read_bytes() for path in first.iterdir())


def test_a_truncated_model_is_made_again(tmp_path: Path) -> None:
    weights = demo.make("a", tmp_path, ignore) / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(1000)
    assert (demo.make("a", tmp_path, ignore) / "model.safetensors").stat().st_size == size


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        demo.make("a", tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


MAKE_A_ON_INPUT = """
import pathlib, sys
from worker.fetch import demo
print("here", flush=True)
sys.stdin.readline()
reports = []
print(demo.make("a", pathlib.Path(sys.argv[1]), lambda done, total: reports.append(done)), bool(reports))
"""


def test_two_processes_at_once_make_one_model(tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_A_ON_INPUT, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=demo.CHAT.parents[3],
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
    for process in both:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    received = [process.communicate(timeout=60)[0].split() for process in both]
    assert len({folder for folder, _ in received}) == 1
    assert sorted(made for _, made in received) == ["False", "True"]


def test_an_unknown_name_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no demo model 'd'; the demo models are chat, embed, a, b, c"):
        demo.make("d", tmp_path, ignore)
