"""Events: one JSON object per line on a worker's stdout; the member `event` names the kind."""

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 1 << 20
"""A longer line on a worker's stdout is skipped by the router."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Work goes on; `done` of `total` (0: unknown). Stages: download (bytes), convert (bytes), start, weights
    (bytes), warmup."""

    stage: str
    done: int = 0
    total: int = 0
    files: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Of a download, `[done, total]` by the URL of each file, or of the largest if there are many."""


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """The snapshot is complete and verified."""

    snapshot: str


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The target is complete. `weights`: bytes of weights written; `tokenizer`: it was converted, too."""

    weights: int
    tokenizer: bool


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """Bytes by shard, in the order of `ModelOptions.devices`; `host`: bytes of host memory beside the shards.

    `inherited`: of `runtime` where the shard is main memory, bytes that the process that was measured has in common
    with the nursery that forked it; 0 for one that was executed, and for accelerators.
    """

    weights: list[int]
    context: list[int]
    compute: list[int]
    runtime: list[int]
    host: int = 0
    inherited: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The answer to `Serve.prepare`: all is done that can be without weights and device; it waits for Go.

    `measured`: bytes of main memory that it occupies, as `cpu`; it takes no more until then.
    """

    measured: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The model answers. `address` as in `Serve.listen` with the real port; `measured`: bytes by device name; `later`,
    `mapped`: as in Pulse."""

    address: str
    measured: dict[str, int]
    later: int = 0
    mapped: int = 0
    capabilities: list[str] = dataclasses.field(default_factory=list)
    """Of chat, completion, embedding, rerank."""
    n_ctx: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Where the time of the load went, by stage, in their order: imports, config, tokenizer, standby (prepared, it
    waited for Go), read, copy (weights that were converted, or that a bus still carried once all were read), build,
    warmup, server. What came before them, this process has not seen."""
    processor: float = 0.0
    """Seconds that the threads of this process have used of the processor together."""
    overhead: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes by device name that such a process takes whatever its model, as far as it could tell: of an accelerator
    beyond what torch's allocator holds, of `cpu` what imports and the way to its accelerators took. Of a forked process
    only the latter."""
    overhead_is_own: bool = True
    """The driver has told of this very process. False: by so much more of its accelerators is in use than before."""
    modules: list[str] = dataclasses.field(default_factory=list)
    """Modules of the model's family that it has (`is_warmable`), so that a nursery may have them, too."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request has ended. `id` is its X-Request-Id."""

    id: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "ok"
    """ok, cancelled or error."""
    ttft: float = 0.0
    """Seconds from arrival at the worker to the first token; 0.0: there was none."""
    token_seconds: float = 0.0
    """Seconds per token after the first one, on average over all choices; 0.0: there was no such token."""
    keep_alive: float | None = None
    """Seconds of idleness after which the worker may go, as this request wants it; -1.0: never; None: as the last one
    that said so, else as configured."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Each second, from the engine's own loop. `steps` counts up; `measured` holds peak bytes by device name."""

    steps: int
    running: int
    waiting: int
    measured: dict[str, int]
    later: int = 0
    """Bytes of main memory that it does not take yet and may at any time: tables for answers that follow a grammar,
    pages that it shares with its nursery until it writes to them."""
    mapped: int = 0
    """Of what it measures of main memory, bytes of files: the kernel says of such pages that anybody may have them."""
    parallel: int = 0
    """Sequences that may run at once; 0: not said."""
    prefill_rate: float = 0.0
    """Prompt tokens computed per second since the pulse before this one; those out of a cache cost nothing and do not
    count."""
    decode_rate: float = 0.0
    """Tokens of answers chosen per second since the pulse before this one."""
    largest: list[int] = dataclasses.field(default_factory=list)
    """The most that steps have had so far: `[tokens of one prompt, sequences, tokens of a sequence up to its end]`; of
    texts without an answer the third is the first. Empty: not said."""
    seen: list[int] = dataclasses.field(default_factory=list)
    """The most of images that steps have had so far: `[tokens of one, images whose features were there at once]`.
    Empty: none yet."""
    cache_used: int = 0
    """Tokens whose keys and values running sequences hold; what several of them share counts once."""
    cache_reusable: int = 0
    """Tokens of ended sequences that are kept for prompts that begin with them; they make way when room is wanted."""
    cache_total: int = 0
    """Tokens that the cache has room for; 0: there is none."""
    slots: list[list[int]] = dataclasses.field(default_factory=list)
    """Who runs: `[place, task, prompt tokens left, tokens decoded, tokens that may still follow]`, by place. A task is
    a number that rises with arrival."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Said once before an exit with a code other than 0: the cause, for a person, in one line."""

    message: str


# Events of the fork server.


@dataclass(frozen=True, kw_only=True)
class Warm:
    """It may fork from now on, and has these modules beyond those that it always has."""

    modules: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Born:
    """The answer to a Fork: the new process. It stays a zombie, once it has ended, until it is ordered to be reaped."""

    id: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The answer to a Fork that would not be safe, or failed."""

    id: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Exited:
    """The answer to a Reap: its exit code, negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True, kw_only=True)
class Here:
    """The answer to a Call."""


Event = (
    Progress | Downloaded | Converted | Estimated | Prepared | Ready | Request | Pulse | Failed | Warm | Born | Refused
    | Exited | Here
)  # fmt: skip
_EVENTS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Event)}
_FIELDS = {kind: frozenset(field.name for field in dataclasses.fields(kind)) for kind in _EVENTS.values()}


def encode(event: Event) -> bytes:
    """One line, ending in a newline."""
    body = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event in `line`; None if it is none that this version knows (such lines are logged and skipped)."""
    try:
        body = json.loads(line)
        kind = _EVENTS[body.pop("event")]
        if not body.keys() <= _FIELDS[kind]:  # a later version's, or nobody's
            body = {key: value for key, value in body.items() if key in _FIELDS[kind]}
        event: Event = kind(**body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return event
