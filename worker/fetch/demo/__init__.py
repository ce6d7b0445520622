"""Demo models that need no network: a trained one for chat and embeddings, and three with random weights.

`chat` and `embed` are the folder `chat/` beside this file, trained by scripts/make_demo_model.py. `a`, `b` and `c` are
made on first use: Llama snapshots of 64, 128 and 256 MiB with the tokenizer of `chat`. Their output is meaningless, but
they load, run and are evicted like any model.

This package imports only the standard library: the worker and the tests make models with it.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

CHAT = Path(__file__).resolve().parent / "chat"
# files that a random model takes from `chat`
SHARED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Shape:
    """The size of a Llama whose key-value heads are KV_HEADS of HEAD channels."""

    hidden: int
    intermediate: int
    layers: int = 8


# 64, 128 and 256 MiB in bfloat16, less about 0.1 %
SHAPES = {
    "a": Shape(hidden=512, intermediate=2184),
    "b": Shape(hidden=768, intermediate=2920),
    "c": Shape(hidden=1024, intermediate=4568),
}
NAMES = ("chat", "embed", *SHAPES)

HEAD = 64
KV_HEADS = 4
SEED = 7
# Numbers until the weights repeat. A prime, so that no two rows of a matrix begin at the same place of the pattern.
PATTERN = 4_194_301
ONE_BYTES = b"\x80\x3f"  # 1.0 in bfloat16, little endian


def make(name: str, target: Path, progress: Callable[[int, int], None]) -> Path:
    """Return the folder of the snapshot of demo model `name`. Create it below `target` if it is missing or damaged.

    `progress(done, total)` counts bytes. The snapshot appears with one rename, so it is never seen in part, even if two
    processes create it at once. Raises ValueError if the name is unknown, OSError if `target` cannot be written.
    """
    if name in ("chat", "embed"):
        return CHAT
    if name not in SHAPES:
        raise ValueError(f"there is no demo model {name!r}; the demo models are {', '.join(NAMES)}")
    config = _config(SHAPES[name])
    tensors = _tensors(SHAPES[name])
    header = _header(tensors)
    size = len(header) + sum(2 * prod(shape) for _, shape in tensors)
    folder = target / f"{name}-{_digest(config, header)}"
    if _is_complete(folder, size):
        return folder
    target.mkdir(parents=True, exist_ok=True)
    part = target / f".{folder.name}.part"
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        if _is_complete(folder, size):
            return folder
        for stale in (folder, part):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            part.mkdir()
            _fill(part, config, header, tensors, lambda done: progress(done, size))
            os.rename(part, folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder


def _is_complete(folder: Path, size: int) -> bool:
    """True if the weights in `folder` have `size` bytes. A crash of the machine can leave a truncated file."""
    try:
        return (folder / "model.safetensors").stat().st_size == size
    except FileNotFoundError:
        return False


def _config(shape: Shape) -> dict[str, Any]:
    """The content of config.json: that of `chat`, so that its tokens match, with another shape."""
    config: dict[str, Any] = json.loads((CHAT / "config.json").read_text("utf-8"))
    config.update(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        dtype="bfloat16",
    )
    return config


def _tensors(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the file. The head is tied to the embeddings."""
    vocabulary = json.loads((CHAT / "config.json").read_text("utf-8"))["vocab_size"]
    hidden, inner, kv = shape.hidden, shape.intermediate, KV_HEADS * HEAD
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors += [
            (prefix + "input_layernorm.weight", (hidden,)),
            (prefix + "self_attn.q_proj.weight", (hidden, hidden)),
            (prefix + "self_attn.k_proj.weight", (kv, hidden)),
            (prefix + "self_attn.v_proj.weight", (kv, hidden)),
            (prefix + "self_attn.o_proj.weight", (hidden, hidden)),
            (prefix + "post_attention_layernorm.weight", (hidden,)),
            (prefix + "mlp.gate_proj.weight", (inner, hidden)),
            (prefix + "mlp.up_proj.weight", (inner, hidden)),
            (prefix + "mlp.down_proj.weight", (hidden, inner)),
        ]
    return [*tensors, ("model.norm.weight", (hidden,))]


def _header(tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file: length, then JSON, padded so that the tensors begin at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(config: dict[str, Any], header: bytes) -> str:
    """A digest of all inputs of a snapshot. It names the folder."""
    digest = hashlib.sha256(json.dumps([config, SEED, PATTERN], sort_keys=True).encode())
    digest.update(header)
    for name in SHARED_FILES:
        digest.update((CHAT / name).read_bytes())
    return digest.hexdigest()[:12]


def _fill(
    folder: Path,
    config: dict[str, Any],
    header: bytes,
    tensors: list[tuple[str, tuple[int, ...]]],
    progress: Callable[[int], None],
) -> None:
    for name in SHARED_FILES:
        shutil.copyfile(CHAT / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    pieces = _pieces(memoryview(_pattern()))
    next(pieces)
    with (folder / "model.safetensors").open("wb") as file:
        done = file.write(header)
        progress(done)
        for _, shape in tensors:
            left = 2 * prod(shape)
            while left:
                piece = ONE_BYTES * shape[0] if len(shape) == 1 else pieces.send(left)  # a norm, or a matrix
                left -= len(piece)
                done += file.write(piece)
                progress(done)


def _pattern() -> bytes:
    """PATTERN numbers in bfloat16, drawn with SEED: about normal, with a deviation of 0.02, none above 0.125.

    The low byte keeps all its random bits, seven of the mantissa and the last of the exponent. The high byte (sign and
    the rest of the exponent) is mapped by a table that gives each pair of binades about its share of a normal
    distribution.
    """
    # shares of 128 with a magnitude below 0.002, 0.008, 0.031 and 0.125
    shares = ((0x3A, 8), (0x3B, 30), (0x3C, 84), (0x3D, 6))
    halves = b"".join(bytes([high]) * share for high, share in shares)
    table = halves + bytes(high | 0x80 for high in halves)
    numbers = bytearray(random.Random(SEED).randbytes(2 * PATTERN))
    numbers[1::2] = numbers[1::2].translate(table)
    return bytes(numbers)


def _pieces(pattern: memoryview) -> Generator[memoryview, int, None]:
    """Repeat `pattern` endlessly: each send(n) yields its next bytes, at least one and at most n."""
    piece = pattern[:0]
    offset = 0
    while True:
        count = yield piece
        piece = pattern[offset : offset + count]
        offset = (offset + len(piece)) % len(pattern)
