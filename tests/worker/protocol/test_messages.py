"""The messages between router and worker: what one side encodes, the other decodes."""

import dataclasses
import json
import re
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.launch.process import decode_event
from worker.protocol import events, orders
from worker.protocol.argv import Command, Download, Estimate, ForkServerOptions, Serve, from_argv, to_argv
from worker.protocol.snapshot_files import shard_names

COMMANDS = (Download, Estimate, Serve, ForkServerOptions)
EVENTS = (
    events.Progress, events.Downloaded, events.Estimated, events.Prepared, events.Ready, events.RequestEnded,
    events.Pulse, events.Failed, events.ModulesImported, events.Forked, events.ForkRefused, events.Reaped,
)  # fmt: skip
# Valid arguments of a process: no NUL, and nothing that UTF-8 cannot encode.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
WORD = st.text(st.characters(exclude_characters="\0,", exclude_categories=["Cs"]), min_size=1)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**62), 2**62),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    tuple[str, ...]: st.lists(WORD).map(tuple),
    list[int]: st.lists(st.integers(0, 2**62)),
    list[str]: st.lists(TEXT),
    list[list[int]]: st.lists(st.lists(st.integers(0, 2**62))),
    dict[str, int]: st.dictionaries(TEXT, st.integers(0, 2**62)),
    dict[str, list[int]]: st.dictionaries(TEXT, st.lists(st.integers(0, 2**62))),
    dict[str, float]: st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False)),
}


def values_of(kinds: tuple[type[Any], ...]) -> st.SearchStrategy[Any]:
    """Instances of any of `kinds`, each field left at its default or drawn."""

    def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
        hints = typing.get_type_hints(kind)
        required: dict[str, st.SearchStrategy[Any]] = {}
        optional: dict[str, st.SearchStrategy[Any]] = {}
        for field in dataclasses.fields(kind):
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            (optional if has_default else required)[field.name] = VALUES[hints[field.name]]
        return st.fixed_dictionaries(required, optional=optional).map(lambda values: kind(**values))

    return st.one_of([instances(kind) for kind in kinds])


@given(values_of((orders.Fork, orders.Reap, orders.ImportModules)))
def test_every_order_survives_its_packet(order: orders.Order) -> None:
    assert orders.decode_order(orders.encode_order(order)) == order


@given(values_of((orders.MemoryGrant,)))
def test_a_memory_grant_survives_its_line(grant: orders.MemoryGrant) -> None:
    line = orders.encode_grant(grant)
    assert (orders.decode_grant(line), line.count(b"\n")) == (grant, 1)


def test_a_fork_server_imports_only_code_of_model_families() -> None:
    good = ["transformers.models.llama.modeling_llama", "transformers.models.qwen2"]
    bad = ["os", "transformers.models.llama.x_y", "transformers.models.a.modeling_a.b", "transformers.models.",
           "transformers_modules.x.modeling_x"]  # fmt: skip
    assert [name for name in (*good, *bad) if orders.is_family_module(name)] == good


@given(values_of(COMMANDS))
def test_every_command_survives_its_argv(command: Command) -> None:
    assert from_argv(to_argv(command)) == command


def test_a_value_may_look_like_the_end_of_the_options() -> None:
    command = Serve(snapshot="--", listen="-x", seed=-3)
    assert from_argv(to_argv(command)) == command


@given(values_of(EVENTS))
def test_every_event_survives_its_line(event: events.Event) -> None:
    line = events.encode(event)
    assert decode_event(line) == event
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


@given(st.one_of(st.binary(), TEXT.map(str.encode), st.recursive(st.none() | TEXT, st.lists).map(json.dumps)))
def test_a_line_without_an_event_is_decoded_to_none(line: bytes | str) -> None:
    assert decode_event(line.encode() if isinstance(line, str) else line) is None


def test_unknown_members_of_an_event_are_ignored() -> None:
    assert decode_event(b'{"event":"failed","message":"m","colour":"red"}') == events.Failed(message="m")
    assert decode_event(b'{"event":"sang","song":"s"}') is None
    assert decode_event(b'{"event":"failed"}') is None


def test_an_option_and_its_value_may_be_two_words() -> None:
    argv = ["serve", "--snapshot", "/m", "--listen", "unix:/s", "--ctx-size", "64", "--trust-remote-code"]
    assert from_argv(argv) == Serve(snapshot="/m", listen="unix:/s", ctx_size=64, trust_remote_code=True)


def test_a_switch_has_a_negative_form() -> None:
    command = from_argv(["estimate", "--snapshot=/m", "--trust-remote-code", "--no-trust-remote-code"])
    assert command == Estimate(snapshot="/m")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "unknown verb ''; one of: download, convert, estimate, serve, fork-server"),
        (["sing"], "unknown verb 'sing'; one of: download, convert, estimate, serve, fork-server"),
        (["serve", "--snapshot=/m", "--listen=x", "--ctx-sise=1"], "serve: unrecognized arguments: --ctx-sise=1"),
        (["serve", "--snapshot=/m", "--listen=x", "--ctx=1"], "serve: unrecognized arguments: --ctx=1"),
        (["serve", "--snapshot=/m", "--listen=x", "snapshot"], "serve: unrecognized arguments: snapshot"),
        (
            ["serve", "--snapshot=/m", "--listen=x", "--ctx-size=many"],
            "serve: argument --ctx-size: invalid int value: 'many'",
        ),
        (["serve", "--snapshot"], "serve: argument --snapshot: expected one argument"),
        (["serve"], "serve: the following arguments are required: --snapshot, --listen"),
        (
            ["download", "--supervised=off"],
            "download: argument --supervised/--no-supervised: ignored explicit argument 'off'",
        ),
        (["estimate", "--snapshot=/m", "--listen=x"], "estimate: unrecognized arguments: --listen=x"),
    ],
)
def test_an_invalid_command_line_is_rejected_with_its_cause(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_argv(argv)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"weight_map": 3}', b'{"weight_map": {}}', b"\xff", b"[" * 100_000]
    + [
        json.dumps({"weight_map": {"a": "a.safetensors", "b": name}}).encode()
        for name in ("../x", "../../etc/passwd", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b", "\ud800", "a\n")
    ],
)
def test_an_index_that_names_no_files_in_its_folder_is_rejected(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(is not an index|names )"):
        shard_names(content)


def test_an_index_names_each_file_once_and_in_order() -> None:
    text = json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}})
    assert shard_names(text.encode()) == ["a.safetensors", "b.safetensors"]
