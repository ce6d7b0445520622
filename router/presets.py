"""One model that may be loaded, and how: what every setting of it is, when nobody has said anything. Law: PURE."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from router import keys
from router.ranks import USUAL
from router.values import shown
from worker.protocol.argv import AdapterSource

GGUF = "GGUF needs the llama-server engine, which this version does not offer; use a safetensors repository"
REPO = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::([A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
)
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q[0-9]|TQ[0-9]|MXFP4|BF16$|F16$|F32$).*", re.IGNORECASE)
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""No `@` and no slash: it stands behind a model's name, and in paths."""
HUB = "hub:"
"""Before the repository of an adapter whose files are not here yet."""


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
    dedup_cache_models: bool = False
    """Whether the cached repository of this preset is not listed a second time."""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    task: Literal["auto", "generate", "embed", "rerank"] = "auto"
    pooling: str = ""
    embd_normalize: int = 2

    # Context and batch
    ctx_size: int = -1
    """Tokens per request; -1: the model's maximum up to 8192; 0: the model's maximum."""
    parallel: int = 4
    kv_tokens: int = 0
    """Tokens that the cache has room for; 0: ctx_size x parallel."""
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    prefill_chunk: int = 512
    max_prefill_tokens: int = 0
    """0: `prefill_chunk` alone bounds a step."""
    limit_images: int = 8
    """Of one prompt."""
    max_input_tokens: int = 0
    n_predict: int = -1
    queue_size: int = 1000
    max_concurrent: int = 0
    """Requests at once; 0: as many as come."""
    request_timeout: float | None = None
    """None: --timeout."""

    # Numerics
    dtype: str = "auto"
    quantization: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    """No CUDA graphs."""
    threads: int = 0
    """0: 1 on an accelerator, half the cores on the CPU."""
    seed: int = -1
    max_logprobs: int = 20

    # Placement
    device: tuple[str, ...] = ()
    """`cpu`, `cuda:N` or a UUID; empty: the planner chooses among the accelerators, or the CPU without any."""
    split_mode: Literal["auto", "none", "layer", "tensor"] = "auto"
    pipeline_parallel: int = 1
    """Accelerators that its layers are split over."""
    tensor_parallel: int = 1
    """Accelerators that each of its matrices is divided among; processes, on main memory."""
    gpu_split: tuple[int, ...] = ()
    """Bytes that it may take: one figure for each accelerator, or one by one."""
    tensor_split: tuple[float, ...] = ()
    """Proportions of its layers, by accelerator."""
    replicas: tuple[int, int] = (1, 1)
    """Workers at once: at least, where memory is free for more than one, and at most."""
    replica_idle: float = 60.0
    required_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by device name (`""`: whatever device it runs on); replaces the estimate."""
    reserved_memory: int = 0
    """Bytes added to the estimate on each device."""

    # Adapters
    lora: tuple[str, ...] = ()
    """`name=folder`, or a repository of the hub in its place."""
    lora_scaled: tuple[str, ...] = ()
    """The same, with `:scale` behind it."""
    default_lora: str = ""
    adapters_dir: str = ""
    enable_lora: str = "auto"
    max_loras: int = 4
    max_lora_rank: int = USUAL
    max_cpu_loras: int = 0
    adapters: tuple[AdapterSource, ...] = ()
    """All that requests may name: of the keys above, and those that came by a call. The path of one that is on the hub
    is `hub:org/name:revision` until its files are here."""

    # Prompt and sampling
    chat_template: str = ""
    chat_template_file: str = ""
    """Where `chat_template` was read from."""
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
    companions: tuple[str, ...] = ()
    """Models that are usually asked for together with this one, by id or alias."""
    sleep_idle: float = -1.0
    """Like `ttl`; but the weights stay in main memory, within --sleep-memory."""
    linger: float = -1.0
    """-1.0: half the waiting model's expected load, 0.2 to 2 seconds; 0 if it is hardly ever asked for so soon."""
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

    @property
    def chunk(self) -> int:
        """Tokens of prompts in one step, at most."""
        return min(self.prefill_chunk, self.max_prefill_tokens or self.prefill_chunk)

    @property
    def adapter_slots(self) -> int:
        """Adapters that memory is kept for; 0: its worker has none, ever."""
        is_auto = self.enable_lora == "auto"
        has_some = bool(self.lora or self.lora_scaled or self.adapters_dir)
        return self.max_loras if self.enable_lora == "on" or (is_auto and has_some) else 0


_LIVE_FIELDS = {key.field for key in keys.KEYS if key.live} | {"source", "chat_template_file", "origins", "adapters"}
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Preset) if field.name not in _LIVE_FIELDS)
DEFAULTS = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(Preset)
}


def same_load(a: Preset, b: Preset) -> bool:
    """Whether both would start the same worker."""
    return a.adapter_slots == b.adapter_slots and all(getattr(a, name) == getattr(b, name) for name in _LOAD_FIELDS)


def repository(text: str) -> tuple[str, str]:
    """(`org/name`, revision) that `org/name[:revision]` means. Raises ValueError, with what to do instead."""
    match = REPO.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        raise ValueError(f"{shown(text)} is not org/name or org/name:revision")
    if match[1].lower().endswith("-gguf") or (match[2] and _QUANTISATION.fullmatch(match[2])):
        raise ValueError(GGUF)
    return match[1], match[2] or "main"
