"""Messages from a worker process to the router: events, and exit codes.

An event is one JSON object per line on the worker's stdout. Its member `event` names the kind (`EVENTS`).
"""

import dataclasses
import json
import re
import typing
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAX_EVENT_BYTES = 1 << 20  # the router skips longer lines
CAPABILITIES = ("chat", "completion", "tools", "vision", "embedding", "rerank")  # that a model may have


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Work advances; a load is judged by it, not by its total time."""

    stage: str  # download (bytes), convert (bytes), start, weights (bytes) or warmup
    done: int = 0
    total: int = 0  # 0: unknown
    # Of a download: `[done, total]` by URL of each file, or of the largest files if there are many.
    files: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """The snapshot is complete and verified."""

    snapshot: str


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The converted snapshot is complete."""

    weights: int  # bytes written


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """The exact estimate: bytes by shard, in the order of `ModelOptions.devices`."""

    weights: list[int]
    context: list[int]
    compute: list[int]
    runtime: list[int]
    host: int = 0  # main memory beside the shards
    # Bytes of `runtime` that the measured process shares with the fork server, where the shard is main memory; 0 for an
    # executed process and for accelerators. The router must not count them once per worker.
    inherited: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that needs neither weights nor devices is done (`Serve.prepare`). The worker waits for a
    `MemoryGrant`, and its main memory does not grow until then."""

    measured: dict[str, int]  # bytes of main memory, under `cpu`


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The model accepts requests."""

    address: str  # `Serve.listen` with the actual port
    measured: dict[str, int]  # bytes by device name
    later: int = 0  # as in Pulse
    unannounced: int = 0  # as in Pulse
    # The part of `unannounced` for larger steps, as estimated or as an earlier load has measured. If it is not 0 and
    # `Serve.warm_up` is False, `measured` is an upper bound until the first `Pulse`.
    steps: int = 0
    mapped: int = 0  # as in Pulse
    capabilities: list[str] = dataclasses.field(default_factory=list)  # of CAPABILITIES
    n_ctx: int = 0
    # Seconds of the load by stage, in order: imports, config, tokenizer, early_start (prepared, waiting for its
    # memory), read, copy (conversion of weights, and transfers that are unfinished once all weights are read), build,
    # kernel (the decode kernel of accelerators, compiled or found in its cache), warmup, graphs (recording of CUDA
    # graphs), handles (of CUDA's libraries), server. The time before the imports is not visible from inside the
    # process.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    processor: float = 0.0  # CPU seconds of all threads of this process
    # Process overhead: bytes by device name that any model would need. On an accelerator: memory outside torch's
    # allocator. On `cpu`: imports and device initialization. A forked process reports accelerators only.
    overhead: dict[str, int] = dataclasses.field(default_factory=dict)
    # False if the driver does not report memory by process: the overhead is then the growth of the device's total use.
    overhead_is_own: bool = True
    # The engine has computed its largest steps with text, so `measured`, `later` and `unannounced` contain what they
    # take.
    has_warmed_up: bool = False
    # Modules of the model's family (`is_family_module`) that this process imported, for the fork server.
    modules: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RequestEnded:
    """One request has ended."""

    id: str  # its X-Request-Id
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "ok"  # ok, cancelled or error
    ttft: float = 0.0  # seconds from arrival at the worker to the first token; 0.0: no token
    token_seconds: float = 0.0  # mean seconds per token after the first, over all choices; 0.0: no such token
    prefill_seconds: float = 0.0  # summed over prompts
    decode_seconds: float = 0.0  # after the first token, summed over choices
    # Idle seconds after which the worker may stop, if the request states it (Ollama). -1.0: never. None: unchanged.
    keep_alive: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """The health of the step loop, sent by the loop itself once per second."""

    steps: int  # counts up
    running: int
    waiting: int
    measured: dict[str, int]  # peak bytes by device name
    # Main memory that is not used yet and may be at any time: data that is shared with the fork server until it is
    # written to, after a warmup on the CPU kernels that steps compile, and what a `MemoryNeed` has announced.
    later: int = 0
    # Main memory that the worker may need besides, and announces by a `MemoryNeed` before it uses it: grammars, and
    # steps that are larger than those so far (`Serve.announce_steps`).
    unannounced: int = 0
    resident: int = 0  # main memory that is in use now, where `measured` is its peak; 0: unknown
    mapped: int = 0  # bytes of `measured` main memory that are mapped files; the kernel counts them as available
    parallel: int = 0  # sequences that may run at once; 0: unknown
    prefill_rate: float = 0.0  # prompt tokens computed per second since the last pulse, without cached tokens
    decode_rate: float = 0.0  # tokens generated per second since the last pulse
    cache_used: int = 0  # tokens in the KV cache of running sequences; shared tokens count once
    cache_reusable: int = 0  # tokens of ended sequences that are kept for prefix caching and evicted on demand
    cache_total: int = 0  # capacity in tokens; 0: no cache
    drafted: int = 0  # tokens drafted since the start (speculative decoding)
    accepted: int = 0  # of these, the tokens that became output
    drafts: int = 0  # drafts since the start: of each sequence of a step one
    accepted_at: list[int] = dataclasses.field(default_factory=list)  # accepted tokens by position in their draft
    batched: int = 0  # sequences of all steps since the start
    longest: int = 0  # most tokens that one sequence has had in the KV cache since the start
    # Running sequences, by slot: `[slot, task, prompt tokens left, tokens decoded, tokens that may follow, tokens
    # drafted, tokens accepted]`. Task numbers rise with arrival.
    slots: list[list[int]] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Main memory is about to be used. The figures replace those of the last pulse, and hold until the next one."""

    measured: dict[str, int]  # peak bytes by device name, of main memory only
    later: int  # as in Pulse
    unannounced: int  # as in Pulse


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The cause of an exit with a code other than 0, in one line. Sent once, just before the exit."""

    message: str


# Events of the fork server.


@dataclass(frozen=True, kw_only=True)
class ModulesImported:
    """The fork server can fork. `modules`: those that it has beyond its fixed list."""

    modules: list[str] = dataclasses.field(default_factory=list)
    resident: int = 0  # bytes of main memory that it holds, mapped libraries included; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Forked:
    """The reply to `Fork`. After its exit the child stays a zombie until a `Reap` order, so that its pid is not reused
    while the router still refers to it."""

    id: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class ForkRefused:
    """The reply to a `Fork` that failed or would not be safe."""

    id: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """The reply to `Reap`. `code`: the exit code, negative for a signal."""

    pid: int
    code: int


Event = (
    Progress | Downloaded | Converted | Estimated | Prepared | Ready | RequestEnded | Pulse | MemoryNeed | Failed
    | ModulesImported | Forked | ForkRefused | Reaped
)  # fmt: skip
# Each kind by its name in lower case, with underscores between words.
EVENTS: dict[str, type[Any]] = {
    re.sub("(?<=.)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in typing.get_args(Event)
}
_NAMES = {kind: name for name, kind in EVENTS.items()}


def encode(event: Event) -> bytes:
    """Return one line, ending in a newline, with the name of the event as its first member."""
    body = {"event": _NAMES[type(event)], **dataclasses.asdict(event)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


class Exit(IntEnum):
    """Exit codes of a worker: the cause of its exit. Any other code, or a signal, is a crash."""

    OK = 0
    USAGE = 2
    UNUSABLE = 3  # config, files, architecture, untrusted code, or 401/403/404 of the hub: a retry would fail too
    DEVICE_MEMORY = 4
    POISONED = 5  # sticky device error: this process can no longer use the device
    HOST_MEMORY = 6
    ORPHANED = 7
    NETWORK = 8
    DISK_FULL = 9
    DAMAGED = 10  # downloaded content failed its check; fetched once more


# No retry until the preset or the snapshot changes, the model is loaded explicitly, or ten minutes have passed.
PERMANENT_EXITS = frozenset({Exit.USAGE, Exit.UNUSABLE})
