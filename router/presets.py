"""Sections to `Preset`: types, defaults, origins.

Law: PURE; what depends on a folder (does this path exist?) comes in as a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model that may be loaded, and how. Bytes are int, times float seconds (-1.0: off)."""

    id: str
    source: Literal["preset", "models_dir", "cache"] = "preset"

    # Source: exactly one of path, repo, demo
    path: str = ""
    """Absolute path of a snapshot folder."""
    repo: str = ""
    """`org/name` on the hub."""
    revision: str = "main"
    demo: str = ""
    """Name of a built-in demo model (`model = demo:NAME`)."""
    tokenizer: str = ""
    load_format: str = "auto"
    trust_remote_code: bool = False
    config_override: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    task: Literal["auto", "generate", "embed"] = "auto"
    pooling: str = ""
    embd_normalize: int = 2

    # Context and batch
    ctx_size: int = -1
    """Tokens per request; -1: the model's maximum up to 8192; 0: the model's maximum."""
    parallel: int = 4
    prefill_chunk: int = 512
    max_input_tokens: int = 0
    n_predict: int = -1
    queue_size: int = 1000
    request_timeout: float | None = None
    """None: --timeout."""

    # Numerics
    dtype: str = "auto"
    quantization: str = "auto"
    attention: str = "auto"
    threads: int = 0
    """0: 1 on an accelerator, half the cores on the CPU."""
    seed: int = -1
    max_logprobs: int = 20

    # Placement
    device: tuple[str, ...] = ()
    """`cpu`, `cuda:N` or a UUID; empty: the planner chooses among the accelerators, or the CPU without any."""
    required_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by device name (`""`: whatever device it runs on); replaces the estimate."""
    reserved_memory: int = 0
    """Bytes added to the estimate on each device."""

    # Prompt and sampling
    chat_template: str = ""
    chat_template_kwargs: str = ""
    sampling: Mapping[str, float | int | str | tuple[str, ...]] = field(default_factory=dict)
    """Defaults for requests, by key: temp, top-k, top-p, min-p, repeat-penalty, repeat-last-n, presence-penalty,
    frequency-penalty, stop."""

    # Lifecycle
    load_on_startup: bool = False
    autoload: bool | None = None
    """None: --models-autoload."""
    pin: bool = False
    priority: int = 0
    ttl: float = -1.0
    linger: float = -1.0
    """-1.0: half the waiting model's expected load, 0.2 to 2 seconds."""
    min_residency: float = -1.0
    """The turn; -1.0: 10 seconds, or --swap-patience if less."""
    start_timeout: float = 240.0
    stop_timeout: float = 10.0
    stall_timeout: float = 120.0
    max_restarts: int = 3

    # Process
    engine: str = "transformers"
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    strict_fields: bool = False

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each key came from, as written for people: `models.ini:14`, `--ctx-size`, `ROUTER_CTX_SIZE`."""
