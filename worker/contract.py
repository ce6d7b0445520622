"""The contract between router and worker: argv, events, exit codes, engine traits.

A worker is a program. Whatever its engine and however it was born, the router speaks to it in exactly these words:
options on the command line, one JSON object a line on stdout, an exit code, and HTTP on the address it was given.
Law: standard library only, and no import of anything else in this project; both sides import this module.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

VERBS = ("download", "convert", "estimate", "serve", "nursery")
MAX_EVENT_BYTES = 1 << 20
"""A longer line on a worker's stdout is skipped by the router."""


class Exit(IntEnum):
    """Why a worker ended, as far as it could say. Any other code, or a signal, is a crash."""

    OK = 0
    USAGE = 2
    UNUSABLE = 3
    """Config, files, architecture, untrusted code, 401/403/404 of a hub: it would fail the same way again."""
    DEVICE_MEMORY = 4
    POISONED = 5
    """A sticky device error: nothing in this process can use the device any more."""
    HOST_MEMORY = 6
    ORPHANED = 7
    NETWORK = 8
    DISK_FULL = 9
    DAMAGED = 10
    """Downloaded content failed its check; one clean refetch may help."""


FINAL_EXITS = frozenset({Exit.USAGE, Exit.UNUSABLE})
"""No retry until the preset or the snapshot changes, somebody loads explicitly, or ten minutes have passed."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """Fetch one model's files and say where they are. The only verb that may use the network."""

    repo: str = ""
    """`org/name` on the hub; empty with `demo`."""
    revision: str = "main"
    demo: str = ""
    """Name of a built-in random-weight model to make instead of fetching one."""
    target: str = ""
    """Folder below which a `demo` model is made."""
    cache: str = ""
    """Hub cache folder; empty: the hub library's own default."""
    adapter: bool = False
    """The repository is a LoRA adapter's: ADAPTER_FILES are all that is fetched."""
    leashed: bool = False
    spawner: int = 0


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Do once what every load of a snapshot would do again: convert weights and tokenizer, into a folder that is a
    snapshot, too. At the lowest priority."""

    snapshot: str
    """Folder with config.json, tokenizer and safetensors files."""
    target: str
    """Folder to make; what is right as it lies is linked there. If nothing has to be converted, it says only that."""
    threads: int = 1
    """torch threads of this process."""
    leashed: bool = False
    spawner: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What decides a model's memory and its answers: shared by `estimate` and `serve`."""

    snapshot: str
    """Folder with config.json, tokenizer and safetensors files."""
    tokenizer: str = ""
    """Folder of another tokenizer; empty: the snapshot's own."""
    task: str = "auto"
    """auto, generate, embed or rerank."""
    devices: tuple[str, ...] = ("cpu",)
    """By shard, in the worker's own numbering: `cpu`, `cuda:0`. The router hides all other devices."""
    layers: tuple[str, ...] = ()
    """How many layers each of several devices has, in their order; none: one device has them all."""
    tensor_parallel: int = 1
    """Processes (ranks) among which each matrix is divided: one for each device, or all of them on the CPU."""
    dtype: str = "auto"
    """auto, float32, float16, bfloat16. auto: the checkpoint's; float16 becomes float32 on the CPU."""
    quantization: str = "auto"
    load_format: str = "auto"
    """auto, safetensors or dummy (random weights)."""
    trust_remote_code: bool = False
    config_override: str = ""
    """JSON object merged into config.json."""
    attention: str = "auto"
    """auto, eager, sdpa or flash."""
    enforce_eager: bool = False
    """No CUDA graphs; on the CPU torch's own kernels for linear layers, and weights stay as they lie."""
    ctx_size: int = 0
    """Tokens per request, prompt and answer together; 0: the model's maximum."""
    parallel: int = 4
    """Sequences in one step."""
    kv_tokens: int = 0
    """Tokens that the cache has room for, of all sequences together; 0: ctx_size x parallel."""
    kv_cache_dtype: str = "auto"
    """Type in which keys and values are kept: auto (the model's own), f32, f16, bf16, int8 or int4. States of
    state-space layers stay as they are."""
    prefill_chunk: int = 512
    """Prompt tokens of one sequence in one step."""
    max_loras: int = 0
    """Adapters in memory at once, of which sequences of one step may use any; 0: none, ever."""
    max_lora_rank: int = 16
    """The largest rank that an adapter may have."""
    limit_images: int = 8
    """Images of one prompt at most, of a model that takes images; 0: none."""
    threads: int = 1
    """torch threads of this process, or of each rank."""
    overhead: int = 0
    """Bytes of each accelerator that a process takes beyond what torch's allocator holds (context, libraries), as one
    on such a device has measured; 0: none has yet, and a constant stands for it."""


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelOptions):
    """Say what `serve` with the same options would occupy, without reading weights."""

    host_overhead: int = 0
    """Bytes of main memory that a process, or each of several ranks, takes beside its accelerators whatever its model,
    as one has measured; 0: none has yet, and a constant stands for it. On the CPU the estimating one is measured."""
    leashed: bool = False
    spawner: int = 0


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Load a model, offline, and answer HTTP for it."""

    listen: str
    """`unix:PATH` or `tcp:HOST:PORT`; port 0: any."""
    name: str = ""
    """The model's id, as reported where a request names none."""
    reserved: str = ""
    """JSON object: bytes by device name that the router has set aside; empty: no promise to keep."""
    prefix_caching: bool = True
    """Keys and values of ended requests serve those that begin with the same tokens, where the cache is made of blocks;
    one of rows keeps nothing."""
    max_input_tokens: int = 0
    """Longest prompt; 0: ctx_size - 1."""
    n_predict: int = -1
    """New tokens where a request states no maximum; -1: to the end of the context."""
    queue_size: int = 1000
    """Requests that may wait for a place in the batch."""
    adapters: str = ""
    """JSON array of AdapterSources: the adapters that requests may name, until the worker is told others."""
    default_adapter: str = ""
    """For requests that name none; empty: the model as it is."""
    max_cpu_loras: int = 0
    """Of so many adapters the files stay open; 0: of all."""
    max_logprobs: int = 20
    warm_up: bool = True
    """On an accelerator the largest step is tried before it is ready, so that what that takes is measured; needless
    where loads before have shown it."""
    seed: int = -1
    """Where a request has none; -1: another one each time."""
    sampling: str = ""
    """JSON object of sampling defaults, keys as in a preset (`temp`, `top-k`, ...)."""
    pooling: str = ""
    """none (a vector for each token), mean, cls, last, rank (the model is a cross-encoder); empty: the model's own."""
    embd_normalize: int = 2
    chat_template: str = ""
    """Jinja text; empty: the tokenizer's."""
    chat_template_kwargs: str = ""
    """JSON object handed to the template."""
    strict_fields: bool = False
    clerk: bool = False
    """With the tokenizer only: answer what counts, or turns chats to text and back, and nothing else. No weights are
    read, and no device is looked at."""
    prepare: bool = False
    """Begin with whatever needs neither weights nor a device, say Prepared, and go on when told so (Go, on stdin).
    `devices` says then only which kind they will be."""
    leashed: bool = False
    spawner: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What holds for requests by one name of a model where they say nothing themselves; fields as in `Serve`, which has
    that of requests under no profile. Several names may share a worker, each with a profile of its own."""

    name: str
    n_predict: int = -1
    seed: int = -1
    sampling: str = ""
    chat_template: str = ""
    chat_template_kwargs: str = ""
    default_adapter: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """A LoRA adapter that requests may name."""

    name: str
    path: str
    """Folder with adapter_config.json and adapter_model.safetensors."""
    scale: float = 1.0
    """On top of the adapter's own."""
    pinned: bool = False
    """Once in device memory it stays there."""


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's weights in one file; where they lie in several, what names these."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What PEFT writes of an adapter, and all that is read of one."""


def merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """What `config_override` makes of config.json: objects are merged key by key, anything else is replaced."""
    found = dict(config)
    for key, value in override.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def shard_names(index: bytes) -> list[str]:
    """The weight files that the text of an index (model.safetensors.index.json) names, in order: all lie beside it.

    Raises ValueError with the rest of a sentence about the index; a name that leads elsewhere is one, so that nobody
    opens what it leads to.
    """
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no index of safetensors files ({type(error).__name__})") from None
    if not names:
        raise ValueError("names no safetensors files")
    if strange := [name for name in names if not name or "/" in name or not is_below(name)]:
        raise ValueError(f"names {strange[0]!r}, which is no file beside it")
    return names


def is_below(name: str) -> bool:
    """Whether a path that a model's files, or a hub, name lies below the model's own folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


def encode_adapters(sources: Sequence[AdapterSource]) -> str:
    """`Serve.adapters`; empty for none."""
    return json.dumps([dataclasses.asdict(each) for each in sources], separators=(",", ":")) if sources else ""


def decode_adapters(text: str) -> list[AdapterSource]:
    """What `encode_adapters` made. Raises ValueError with a message for a person."""
    try:
        return [AdapterSource(**each) for each in json.loads(text or "[]")]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"adapters: no JSON array of adapters ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Nursery:
    """Import everything once, then fork workers as the router orders. For routers only; always leashed."""

    orders: int
    """Descriptor of the socket (AF_UNIX, SOCK_SEQPACKET) on which orders come."""
    leashed: bool = False
    spawner: int = 0


Command = Download | Convert | Estimate | Serve | Nursery
_COMMANDS: dict[str, type[Any]] = {
    "download": Download, "convert": Convert, "estimate": Estimate, "serve": Serve, "nursery": Nursery,
}  # fmt: skip


def to_argv(command: Command) -> list[str]:
    """The verb and options that `from_argv` turns back into an equal command; defaults are left out."""
    argv = [type(command).__name__.lower()]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            argv.append(f"{flag}={','.join(value)}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def from_argv(argv: Sequence[str]) -> Command:
    """The command that `argv` (verb first) spells, as `--key=value` or `--key value`.

    Raises ValueError with a message for a person if verb, option or value is unknown.
    """
    if not argv or argv[0] not in _COMMANDS:
        known = ", ".join(VERBS)
        raise ValueError(f"unknown verb {argv[0] if argv else ''!r}; one of: {known}")
    kind = _COMMANDS[argv[0]]
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    words = list(argv[1:])
    while words:
        word = words.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--no-") and hints.get(name[3:]) is bool:
            values[name[3:]] = False
            continue
        if not word.startswith("--") or name not in fields:
            raise ValueError(f"{argv[0]}: unknown option {word!r}")
        if hints[name] is bool:
            if has_value:
                flag = name.replace("_", "-")
                raise ValueError(f"{argv[0]}: {word!r} takes no value; say --{flag} or --no-{flag}")
            values[name] = True
            continue
        if not has_value:
            if not words:
                raise ValueError(f"{argv[0]}: option {word!r} needs a value")
            text = words.pop(0)
        try:
            values[name] = _convert(hints[name], text)
        except ValueError:
            raise ValueError(f"{argv[0]}: {word!r} needs a number") from None
    missing = [
        f"--{name.replace('_', '-')}"
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ValueError(f"{argv[0]}: missing {', '.join(missing)}")
    command: Command = kind(**values)
    return command


def _convert(hint: Any, text: str) -> Any:
    if hint is int:
        return int(text)
    if isinstance(hint, types.GenericAlias):
        return tuple(part for part in text.split(",") if part)
    return text


# Events: what a worker says on stdout, one JSON object a line, `event` naming the kind.


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


# What a nursery says beside them.


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


# What `convert` leaves in its target, for whoever looks whether that may be used.

MANIFEST = "converted.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted snapshot is of. One without files says that nothing had to be converted."""

    source: str
    """Folder of the snapshot."""
    files: dict[str, list[int]]
    """Size in bytes and time of the last change in nanoseconds of each file that was written, by name; all others are
    links."""


def encode_manifest(manifest: Manifest) -> bytes:
    return json.dumps(dataclasses.asdict(manifest), indent=1).encode() + b"\n"


def decode_manifest(text: bytes) -> Manifest:
    """Raises ValueError, TypeError, KeyError or AttributeError if it is none."""
    body = json.loads(text)
    files: dict[str, list[int]] = {name: [int(size), int(changed)] for name, (size, changed) in body["files"].items()}
    return Manifest(source=str(body["source"]), files=files)


# The word that follows the token on stdin, to a worker that was started with `Serve.prepare`.


@dataclass(frozen=True, kw_only=True)
class Go:
    """There is room now. What was not known when the worker was started: `devices` and `reserved` as in `Serve`, and
    `visible`, what CUDA_VISIBLE_DEVICES is to be from now on."""

    devices: list[str]
    reserved: str = ""
    visible: str = ""


def encode_go(go: Go) -> bytes:
    """One line, ending in a newline."""
    return json.dumps(dataclasses.asdict(go), separators=(",", ":")).encode() + b"\n"


def decode_go(line: bytes) -> Go:
    """Raises ValueError or TypeError if the line is none."""
    return Go(**json.loads(line))


# Orders: what a router tells its nursery, one packet each. Answers are events.


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Bring a worker into the world. With the packet come four descriptors: the new process's stdin, stdout and stderr,
    and a file that holds a Birth."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Reap:
    """This child of the nursery has ended, and its group was killed: it may go."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Import:
    """These modules were wanted by a worker: have them before the next one is born."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Say that you are there."""


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What a forked worker begins with, in place of a command line. `argv`: verb first."""

    argv: list[str]
    env: dict[str, str]


Order = Fork | Reap | Import | Call
MAX_ORDER_BYTES = 1 << 16
_ORDERS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Order)}


def encode_order(order: Order) -> bytes:
    """One packet."""
    return json.dumps({"order": type(order).__name__.lower(), **dataclasses.asdict(order)}).encode()


def decode_order(packet: bytes) -> Order:
    """The order in `packet`. Raises ValueError, TypeError or KeyError if it is none."""
    body = json.loads(packet)
    order: Order = _ORDERS[body.pop("order")](**body)
    return order


def is_warmable(module: str) -> bool:
    """Whether a nursery may import `module` because a worker did: transformers' own code for one family of models."""
    return _FAMILY_MODULE.fullmatch(module) is not None


_FAMILY_MODULE = re.compile(
    r"transformers\.models\.[a-z0-9_]+(\.(configuration|modeling|tokenization|processing)_[a-z0-9_]+)?"
)


@dataclass(frozen=True)
class EngineTraits:
    """What the router must know of an engine."""

    forks: bool
    """May be born by fork from a process that has its imports done."""
    quiet: bool
    """Measures its device while it starts, so no other load may run there meanwhile."""


ENGINES = {"transformers": EngineTraits(forks=True, quiet=False)}
