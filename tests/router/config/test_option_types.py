"""The option types."""

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.option_types import (
    DeviceNames,
    Flag,
    Integer,
    JsonObject,
    Kind,
    Memory,
    MemoryByDevice,
    Names,
    Number,
    OneOf,
    Seconds,
    Share,
    Sizes,
    Strings,
    Text,
)
from router.planner.ledger import DeviceShare
from worker.protocol.memory import MIB

TIME = Seconds(off=-1.0, words={"auto": -2.0})


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        *((Flag(), word, True) for word in ("on", "true", "Yes", "ENABLED", "1")),
        *((Flag(), word, False) for word in ("off", "false", "no", "Disabled", "0")),
        (Integer(), " 12 ", 12),
        (Integer(-1), "-1", -1),
        (Integer(1, words={"-1": 4, "auto": 4}), "AUTO", 4),
        (Number(), "0.7", 0.7),
        (Number(), "1e-2", 0.01),
        (TIME, "1.5", 1.5),
        (TIME, "500ms", 0.5),
        (TIME, "5m", 300.0),
        (TIME, "1d", 86400.0),
        (TIME, "-1", -1.0),
        (TIME, "auto", -2.0),
        (Memory(), "9000", 9000 * MIB),
        (Memory(), "9GiB", 9 << 30),
        (Memory(), "1.5 gib", 3 << 29),
        (Memory(), "512MB", 512_000_000),
        (MemoryByDevice(), "9000", {"": 9000 * MIB}),
        (MemoryByDevice(), "cuda:0=2048, cpu=4GiB", {"cuda:0": 2 << 30, "cpu": 4 << 30}),
        (MemoryByDevice(), "1,2", {"cuda:0": MIB, "cuda:1": 2 * MIB}),
        (Share(), "0.9", 0.9),
        (Share(), "90%", 0.9),
        (Share(), "12.5 %", 0.125),
        (MemoryByDevice(shares=True), "cuda:0=90%, cpu=4GiB", {"cuda:0": DeviceShare(0.9), "cpu": 4 << 30}),
        (DeviceNames(), "auto", ()),
        (DeviceNames(), "none", ("cpu",)),
        (DeviceNames(), "0,gpu1,CUDA2,cuda:3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        (DeviceNames(), "GPU-8a1b-77", ("GPU-8a1b-77",)),
        (Names(), "a, b,,a", ("a", "b")),
        (Names(), '["a,b", "c"]', ("a,b", "c")),
        (Strings(), "a, b", ("a", " b")),
        (Strings(), '["\\n\\n", "x,y"]', ("\n\n", "x,y")),
        (OneOf(("a",), {"b": "a"}), "B", "a"),
        (JsonObject(), '{"b": 1, "a": [true]}', '{"a":[true],"b":1}'),
        (JsonObject(), " ", ""),
    ],
)
def test_a_text_is_converted(kind: Kind, text: str, value: Any) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Flag(), "perhaps", '"perhaps" is neither on nor off'),
        (Flag(), "", "the value is empty; write on or off"),
        (Integer(0, 5), "6", '"6" is not a whole number from 0 to 5'),
        (Integer(1, 5), "1.5", '"1.5" is not a whole number from 1 to 5'),
        (Integer(), "9" * 5000, "whole number"),
        (Number(0, 2), "nan", '"nan" is not a number from 0 to 2'),
        (Number(), "1e999", '"1e999" is not a number from -1000000000 to'),
        (Seconds(), "-1", "cannot be turned off"),
        (Seconds(), "soon", "write seconds, or 5m"),
        (Seconds(low=0.1), "0", "0.1 seconds or more"),
        (Seconds(), "9" * 12 + "d", "30 years"),
        (Memory(), "-5", "not a size; write MiB, or"),
        (Sizes(), "24,x", '"x" is not a size; write GiB, or'),
        (Memory(), "9 parsecs", "not a size"),
        (Memory(), "99999999999999", "more than any device has"),
        (Integer(words={"auto": 3}), "-1", '"-1" is not a whole number from 0 to 2147483648, nor auto'),
        (Memory(low=MIB), "0", "at least 1 MiB"),
        (MemoryByDevice(named=True), "600", "names no device"),
        (MemoryByDevice(), "tpu:0=5", "no device"),
        (MemoryByDevice(), "cpu=5,none=6", "twice"),
        (MemoryByDevice(), "", "no size"),
        (MemoryByDevice(), "cpu=90%", "not a size"),
        (MemoryByDevice(shares=True), "cpu=101%", "not a share above 0 and up to 1"),
        (Share(), "0", "not a share above 0 and up to 1"),
        (Share(), "1.01", "not a share"),
        (Share(), "nan", "not a share"),
        (DeviceNames(), "cpu,cuda:0", "do not mix"),
        (DeviceNames(), "gpu-zero", "no device"),
        (DeviceNames(), "mps", "is not supported by this version"),
        (Names("[a-z]+", "is not small"), "a,B", "is not small"),
        (Strings(), '["a", 1]', "JSON list of strings"),
        (Strings(), '["\\ud800"]', "surrogate"),
        (Strings(), "[a", "JSON list"),
        (OneOf(("a", "b")), "c", "'c' is not one of 'a', 'b'"),
        (OneOf(("a",), refused={"b": "use a"}), "b", "not offered by this version: use a"),
        (Text("x", "[0-9]+", "is no number"), "a", "is no number"),
        (JsonObject(), "[1]", "not a JSON object"),
        (JsonObject(), "{", "not JSON"),
        (JsonObject(), '{"a": NaN}', "not JSON"),
        (JsonObject(), '{"a": 1e999}', "not JSON"),
        (JsonObject(), '{"a": "\\udc00"}', "surrogate"),
        (JsonObject(), '{"a":' * 100_000, "not JSON"),
    ],
)
def test_an_invalid_text_is_explained_in_a_short_message(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(click.BadParameter, match=message) as caught:
        kind(text)
    assert len(caught.value.message) < 200


KINDS = [
    Flag(), Integer(-1, words={"auto": -5}), Number(), TIME, Memory(), MemoryByDevice(), DeviceNames(), Names(),
    Strings(), JsonObject(), OneOf(("a", "b")), Text(), MemoryByDevice(shares=True), Share(),
]  # fmt: skip


@given(st.sampled_from(KINDS), st.text(max_size=30) | st.from_regex(r"[-0-9.a-z=,:{}\[\]\"]{0,12}", fullmatch=True))
def test_any_text_is_rejected_or_converted_and_a_value_can_be_written(kind: Kind, text: str) -> None:
    try:
        value = kind(text)
    except click.BadParameter:
        return
    assert kind(kind.write(value)) == value
