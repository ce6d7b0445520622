"""`router run`: questions and answers of a chat, with a transport in place of a router."""

import io
import json
from typing import Any

import httpx
import pytest

from router.cli import chat
from router.cli.main import main


def frame(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *answers: httpx.Response) -> tuple[int, list[Any]]:
    """The exit code, and the messages of each request."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    asked, left = [], list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (request.url.path, body["model"], body["stream"]) == ("/v1/chat/completions", "m", True)
        asked.append([message["content"] for message in body["messages"]])
        return left.pop(0)

    with httpx.Client(base_url="http://router", transport=httpx.MockTransport(answer)) as http:
        try:
            code = chat._chat(http, "m")
        except EOFError:
            code = 0
    assert not left
    return code, asked


def streamed(*frames: bytes) -> httpx.Response:
    return httpx.Response(200, content=b": waiting\n\n" + b"".join(frames) + b"data: [DONE]\n\n")


def test_answers_are_printed_and_are_part_of_the_next_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = streamed(frame(role="assistant"), frame(reasoning_content="(hm) "), frame(content="Two "), frame(content="!"))
    code, asked = talk(monkeypatch, "1 + 1?\n\nsure?\n/clear\nagain\n/bye\nnever asked\n",
                       one, streamed(frame(content="yes")), streamed(frame(content="no")))  # fmt: skip
    assert code == 0
    assert asked == [["1 + 1?"], ["1 + 1?", "Two !", "sure?"], ["again"]]
    assert capsys.readouterr().out == "(hm) Two !\nyes\nno\n"


def test_the_end_of_the_input_ends_the_chat_and_an_unknown_command_asks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/help\n") == (0, [])
    assert "/bye or Ctrl-D ends the chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "refusal",
    [
        httpx.Response(507, json={"error": {"message": "m does not fit"}}),
        streamed(frame(content="Tw"), b'data: {"error": {"message": "m does not fit"}}\n\n'),
    ],
)
def test_a_refused_question_that_a_program_asks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: httpx.Response
) -> None:
    code, asked = talk(monkeypatch, "hello\nmore\n", refusal)
    assert (code, asked) == (1, [["hello"]])
    assert capsys.readouterr().err.endswith("m does not fit\n")


def test_the_named_model_is_asked_and_a_router_that_refuses_the_list_ends_the_chat() -> None:
    rows = [{"id": "first", "aliases": []}, {"id": "org/m", "aliases": ["m"]}]
    answers = [httpx.Response(200, json={"data": rows})] * 3 + [httpx.Response(401, json={})]
    transport = httpx.MockTransport(lambda request: answers.pop(0))
    with httpx.Client(base_url="http://router", transport=transport) as http:
        assert [chat._first(http, model) for model in ("org/m", "m", "./folder")] == ["org/m", "org/m", "first"]
        with pytest.raises(chat.ChatError, match="401"):
            chat._first(http, "m")


@pytest.mark.parametrize("body", ["<h1>Bad Gateway</h1>", "[]", '{"error": "down"}'])
def test_an_error_of_a_proxy_is_named_by_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    assert talk(monkeypatch, "hello\n", httpx.Response(502, text=body)) == (1, [["hello"]])
    assert capsys.readouterr().err.endswith("router answered 502\n")


@pytest.mark.parametrize(
    "words",
    [
        ["-hf", "/no/repository"],
        ["-hfr=/no/repository"],
        ["-hft", "hf_1", "-hf", "/no/repository"],
        ["-hfd", "org/draft", "-hf", "/no/repository"],
    ],
)
def test_a_repository_is_named_as_for_llama_cli(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 1
    assert '--hf-repo: [repository] "/no/repository" is not org/name' in capfd.readouterr().err
