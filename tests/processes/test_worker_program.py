"""The worker program as people and routers start it: command line, exit codes, a real model, and its exit."""

import dataclasses
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from tests import tiny
from tests.children import TOKEN, Child, environment, python
from worker.errors import StartError
from worker.program.main import CRASHED, diagnose, limit_cpu, run_last
from worker.program.serve import _wait_for_grant
from worker.protocol.argv import COMMANDS, VERBS, Serve
from worker.protocol.events import Exit, Failed, Progress, Ready, RequestEnded
from worker.server.server import stop_requested

WORKER = python("-m", "worker")
STDIN = f"{TOKEN}\n".encode()
SUPERVISED = ("--supervised", f"--parent-pid={os.getpid()}")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context long enough for a response that does not end during a test."""
    return tiny.make("llama", tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=32768)


def by_hand(*options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a short run."""
    with Child([*WORKER, *options]) as child:
        out = ""
        while (line := child.line()) is not None:
            out += line + "\n"
        return child.exit(), out, child.log


# Command line


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_every_option_of_a_verb(verb: str) -> None:
    code, out, _ = by_hand(verb, "--help")
    assert code == 0
    for field in dataclasses.fields(COMMANDS[verb]):
        assert field.name.replace("_", "-") in out


def test_help_names_the_verbs() -> None:
    code, out, _ = by_hand("--help")
    assert code == 0
    assert all(f"\n  {verb}" in out for verb in VERBS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "worker: no verb; one of download, convert, estimate, serve; see worker --help"),
        (("sing",), f"worker: unknown verb 'sing'; one of: {', '.join(VERBS)}; see worker --help"),
        (("serve", "--snapshot=/m"),
         "worker: serve: the following arguments are required: --listen; see worker --help"),
        (("download", "--supervised"), "worker: --supervised needs --parent-pid=PID, the process id of the parent"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_exits_2_with_a_message(options: tuple[str, ...], message: str) -> None:
    assert by_hand(*options) == (Exit.USAGE, "", message + "\n")


def test_a_supervised_worker_reports_the_cause_of_its_failure() -> None:
    with Child([*WORKER, "serve", "--snapshot=/m", *SUPERVISED], stdin=STDIN) as child:
        assert child.events() == [
            Failed(message="serve: the following arguments are required: --listen; see worker --help")
        ]
        assert child.exit() == Exit.USAGE


def test_a_worker_without_a_token_refuses_to_serve() -> None:
    argv = [*WORKER, "serve", "--snapshot=/m", "--listen=unix:/nowhere", *SUPERVISED]
    with Child(argv, stdin=b"\n") as child:
        assert "token" in child.event(Failed).message
        assert child.exit() == Exit.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartError("no config.json"), Exit.UNUSABLE),
        (StartError("cut short", Exit.DAMAGED), Exit.DAMAGED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Exit.DEVICE_MEMORY),
        (
            torch.AcceleratorError("CUDA error: out of memory\nSearch for it online"),
            Exit.DEVICE_MEMORY,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), Exit.DEVICE_MEMORY),
        (MemoryError(), Exit.HOST_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), Exit.HOST_MEMORY),
        (OSError(12, "Cannot allocate memory"), Exit.HOST_MEMORY),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), Exit.POISONED),
        (RuntimeError("CUDA error: device-side assert triggered"), Exit.POISONED),
        (OSError(28, "No space left on device"), Exit.DISK_FULL),
        (ValueError("surprise"), CRASHED),
        (KeyError("surprise"), CRASHED),
    ],
)
def test_the_kind_of_error_decides_the_exit_code(error: Exception, code: int) -> None:
    found, message = diagnose(error)
    assert found == code
    assert message
    assert "\n" not in message


def test_the_cause_of_an_error_counts() -> None:
    error = RuntimeError("loading failed")
    error.__cause__ = MemoryError("9 bytes")
    assert diagnose(error) == (Exit.HOST_MEMORY, "out of host memory: 9 bytes")


# A model


@pytest.mark.slow
def test_a_worker_started_by_hand_answers_and_drains_on_sigterm(snapshot: Path) -> None:
    argv = [*WORKER, "serve", f"--snapshot={snapshot}", "--listen=tcp:127.0.0.1:0", "--ctx-size=32768", "--parallel=1"]
    with Child(argv) as child:
        ready = child.event(Ready)
        assert ready.n_ctx == 32768
        assert ready.capabilities == ["chat", "completion"]
        url = ready.address.replace("tcp:", "http://")
        assert f"listens on {url}" in child.log
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] <= 4
            assert child.event(RequestEnded).completion_tokens == answer["usage"]["completion_tokens"]
            endless = {**body, "max_tokens": 30000, "ignore_eos": True, "stream": True}
            frames = list(_stopped_after_the_first(client, endless, child))
            assert child.exit() == Exit.OK
    assert '"reason":"draining"' in frames[-1].replace(" ", "")
    assert "[DONE]" not in "".join(frames)


def _stopped_after_the_first(client: httpx.Client, body: dict[str, object], child: Child) -> Iterator[str]:
    """Frames of an answer during whose first one the worker is asked to stop."""
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        yield next(lines)
        child.signal(signal.SIGTERM)
        try:
            yield from (line for line in lines if line)
        except httpx.RemoteProtocolError:
            return
        raise AssertionError("a cut answer must not end like a complete one")


def test_a_line_that_is_no_memory_grant_is_refused() -> None:
    command, channel = Serve(snapshot="/m", listen="unix:/s"), SimpleNamespace(receive_line=lambda: b"come\n")
    with pytest.raises(StartError, match="not a memory grant") as refused:
        _wait_for_grant(command, channel)  # type: ignore[arg-type]
    assert refused.value.exit == Exit.USAGE


def test_an_estimate_that_takes_too_much_cpu_time_ends_with_the_cause() -> None:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            limit_cpu(0.1)
            while True:
                pass
        except TimeoutError as error:
            code = 7 if "0.1 s of CPU time" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


POISONED = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

class Config(PreTrainedConfig):
    model_type = "poisoned"

class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        if 400 in input_ids:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return BaseModelOutput(last_hidden_state=self.embed(input_ids))
"""


@pytest.mark.slow
def test_a_device_that_is_lost_while_serving_ends_the_worker_as_poisoned(snapshot: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((snapshot / name).read_bytes())
    code = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    config = {
        "model_type": "poisoned", "architectures": ["Model"], "auto_map": code, "vocab_size": 512, "pad_token_id": 0,
        "max_position_embeddings": 64, "hidden_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(POISONED)
    options = ["--task=embed", "--trust-remote-code", "--load-format=dummy", f"--listen=unix:{tmp_path}/s"]
    argv = [*WORKER, "serve", f"--snapshot={tmp_path}", *options, *SUPERVISED]
    home = environment(HF_HOME=str(tmp_path / "home"))
    with Child(argv, stdin=STDIN, env=home) as child:
        child.event(Ready)
        transport = httpx.HTTPTransport(uds=f"{tmp_path}/s")
        with httpx.Client(transport=transport, base_url="http://worker", timeout=60) as client:
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            assert client.post("/v1/embeddings", json={"input": [300]}).status_code == 200
            assert client.post("/v1/embeddings", json={"input": [400]}).status_code >= 500
        assert "illegal memory access" in child.event(Failed).message
        assert child.exit() == Exit.POISONED


def test_a_second_signal_does_not_kill_a_worker_that_has_stopped_serving() -> None:
    async def until_a_signal() -> None:
        stop = stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()

    pid = os.fork()
    if not pid:
        code = 1
        try:
            run_last(until_a_signal())
            gc.collect()
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_while_it_loads_stops(snapshot: Path) -> None:
    with Child([*WORKER, "serve", f"--snapshot={snapshot}", "--listen=tcp:127.0.0.1:0"]) as child:
        child.event(Progress)
        child.signal(signal.SIGTERM)
        assert child.exit() == Exit.OK
