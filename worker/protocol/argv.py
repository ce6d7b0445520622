"""The command line of a worker: one frozen dataclass for each verb, and the engines that may run behind it.

A worker is a program: the router starts `python -m worker VERB --options`, where the options are the fields of the
dataclass.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VERBS = ("download", "convert", "estimate", "serve", "nursery")


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
    snapshot, too."""

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
    """auto, eager or sdpa."""
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


@dataclass(frozen=True)
class EngineTraits:
    """What the router must know of an engine."""

    forks: bool
    """May be born by fork from a process that has its imports done."""
    exclusive: bool
    """Measures its device while it starts, so no other load may run there meanwhile."""


ENGINES = {"transformers": EngineTraits(forks=True, exclusive=False)}
