"""The command line of a worker: one frozen dataclass for each verb, and the engines that a worker may run.

The router starts `python -m worker VERB --options`. The options are the fields of the verb's dataclass. The docstring
of the class is the text of the verb in `worker --help`.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# The values of options of `ModelOptions` that are preset keys as well, and of the key `pooling`.
TASKS = ("auto", "generate", "embed", "rerank")
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "int8", "int4")
POOLINGS = ("none", "mean", "cls", "last", "rank")


def _option(default: T, text: str) -> T:
    """A field with its text in the help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Options that routers add to each verb."""

    supervised: bool = _option(False, "Read a token line from stdin, and exit when stdin ends or the parent exits.")
    parent_pid: int = _option(0, "Process id of the parent; required with --supervised.")


@dataclass(frozen=True, kw_only=True)
class Download(Supervised):
    """Download one snapshot and print its folder. The only verb that may use the network."""

    repo: str = _option("", "`org/name` on the hub; empty with `demo`.")
    revision: str = _option("main", "Branch, tag or commit.")
    demo: str = _option("", "Name of a built-in model to create instead of downloading one.")
    target: str = _option("", "Folder in which a `demo` model is created.")
    cache: str = _option("", "Hub cache folder; empty: the hub library's own default.")
    adapter: bool = _option(False, "The repository contains a LoRA adapter: download only the adapter's files.")


@dataclass(frozen=True, kw_only=True)
class Convert(Supervised):
    """Convert the weights of a snapshot to the form that the engine uses, so that loads need not.

    The target is a snapshot too. Runs at the lowest CPU and disk priority.
    """

    snapshot: str = field(metadata={"help": "Folder with config.json, tokenizer and safetensors files."})
    target: str = field(
        metadata={
            "help": "Folder to create. Files that need no conversion become links. If nothing needs conversion, only"
            " the manifest is written."
        }
    )
    threads: int = _option(1, "torch threads of this process.")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that decide the memory and the output of a model: shared by `estimate` and `serve`."""

    snapshot: str = field(metadata={"help": "Folder with config.json, tokenizer and safetensors files."})
    tokenizer: str = _option("", "Folder of the tokenizer; empty: the snapshot.")
    task: str = _option("auto", "auto, generate, embed or rerank.")
    devices: tuple[str, ...] = _option(
        ("cpu",),
        "Device of each shard, numbered as the worker sees them: `cpu`, `cuda:0`. The router hides all other devices.",
    )
    layers: tuple[str, ...] = _option(
        (), "Layer split: number of layers on each of several devices, in order; none: one device."
    )
    tensor_parallel: int = _option(
        1, "Number of tensor-parallel ranks (processes): one for each device, or all of them on the CPU."
    )
    dtype: str = _option(
        "auto",
        "auto, float32, float16 or bfloat16. auto: the type of the checkpoint; on the CPU float16 becomes float32.",
    )
    quantization: str = _option("auto", "Quantization method of the checkpoint; auto: as its config states.")
    load_format: str = _option("auto", "auto, safetensors or dummy (random weights).")
    trust_remote_code: bool = _option(
        False, "Run code that comes with the model. Off: models that need it are rejected."
    )
    config_override: str = _option("", "JSON object merged into config.json.")
    rope: str = _option("", "JSON object of RoPE keys, as in a preset (`rope-scale`, `alpha-value`, ...).")
    attention: str = _option("auto", "auto, eager or sdpa.")
    enforce_eager: bool = _option(
        False,
        "Do not record CUDA graphs. On the CPU: use torch's kernels for linear layers and do not reorder weights.",
    )
    ctx_size: int = _option(
        0, "Context length of one request in tokens, prompt and completion together; 0: the model's maximum."
    )
    parallel: int = _option(4, "Maximum number of sequences in one step.")
    contexts: int = _option(0, "Requests of ctx_size tokens for which the KV cache has room; 0: as many as parallel.")
    kv_tokens: int = _option(0, "Capacity of the KV cache in tokens, over all sequences; 0: ctx_size x contexts.")
    kv_cache_dtype: str = _option(
        "auto",
        "Type of the KV cache: auto (the type of the model), f32, f16, bf16, int8 or int4. Does not apply to "
        "the states of state-space layers.",
    )
    draft_max: int = _option(
        16, "Speculative decoding: maximum number of tokens that are drafted for one sequence in one step."
    )
    draft_snapshot: str = _option("", "Folder of the draft model; empty: none.")
    ngram_size: int = _option(
        0, "Draft by prompt lookup: number of newest tokens that are looked up in the text; 0: no prompt lookup."
    )
    prefill_chunk: int = _option(512, "Maximum number of prompt tokens of one sequence in one step (chunked prefill).")
    max_loras: int = _option(0, "LoRA adapters in device memory at once; 0: adapters are disabled.")
    max_lora_rank: int = _option(16, "Largest LoRA rank of an adapter.")
    limit_images: int = _option(8, "Maximum number of images in one prompt of a vision model; 0: none.")
    threads: int = _option(1, "torch threads of this process, or of each rank.")
    overhead: int = _option(
        0,
        "Process overhead in bytes on each accelerator, outside torch's allocator (context, libraries), as "
        "measured by an earlier worker; 0: not measured yet, a constant is used.",
    )

    @property
    def speculates(self) -> bool:
        """True if tokens are drafted (speculative decoding)."""
        return self.draft_max > 0 and (self.ngram_size > 0 or bool(self.draft_snapshot))


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelOptions, Supervised):
    """Estimate the memory that `serve` needs with the same options, without reading weights."""

    host_overhead: int = _option(
        0,
        "Process overhead in bytes of main memory for a process, or for each rank, that uses accelerators, as "
        "measured by an earlier worker; 0: not measured yet, a constant is used. On the CPU the estimating "
        "process measures itself.",
    )


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions, Supervised):
    """Load a model without network access and serve it over HTTP."""

    listen: str = field(metadata={"help": "Address: `unix:PATH` or `tcp:HOST:PORT`; port 0: any free port."})
    name: str = _option("", "Id of the model in responses to requests that name no model.")
    reserved: str = _option("", "Reservation, a JSON object of bytes by device name; empty: no limit.")
    prefix_caching: bool = _option(
        True, "Reuse the KV cache of earlier requests that begin with the same tokens. Paged caches only."
    )
    max_input_tokens: int = _option(0, "Longest prompt in tokens; 0: ctx_size - 1.")
    n_predict: int = _option(-1, "New tokens of a request that states no maximum; -1: up to the end of the context.")
    draft_min: int = _option(0, "Shortest draft that is worth a step.")
    queue_size: int = _option(1000, "Maximum number of requests that wait for a place in the batch.")
    adapters: str = _option(
        "", "JSON array of AdapterSource: the adapters that requests may name, until the router replaces the list."
    )
    default_adapter: str = _option("", "Adapter of requests that name none; empty: no adapter.")
    max_cpu_loras: int = _option(0, "Number of adapters whose files stay open; 0: all.")
    max_logprobs: int = _option(20, "Maximum number of alternatives per token in one request.")
    warm_up: bool = _option(
        True,
        "On an accelerator, run the largest step before reporting readiness, so that its memory is measured. "
        "Not needed where earlier loads have measured it.",
    )
    announce_steps: bool = _option(
        False,
        "Announce main memory before a step that is larger than all before. Without a warmup, `reserved` contains what "
        "the largest steps take, as an earlier load measured it or as it is estimated.",
    )
    seed: int = _option(-1, "Seed of requests that have none; -1: random.")
    sampling: str = _option("", "JSON object of sampling defaults, keys as in a preset (`temp`, `top-k`, ...).")
    pooling: str = _option(
        "",
        "none (one vector for each token), mean, cls, last or rank (cross-encoder); empty: as the model is configured.",
    )
    embd_normalize: int = _option(2, "Norm of vectors: -1 none, 0 largest value, 1 taxicab, 2 Euclidean.")
    chat_template: str = _option("", "Jinja text of the chat template; empty: the tokenizer's template.")
    chat_template_kwargs: str = _option("", "JSON object of variables for the chat template.")
    strict_fields: bool = _option(False, "Reject requests with fields that have no meaning here.")
    prepare: bool = _option(
        False,
        "Early start: do the part of the load that needs neither weights nor devices, report `prepared`, and "
        "wait for a MemoryGrant on stdin. Until then `devices` names only the kind of device.",
    )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Request defaults for one name of a model, because several names may share one worker. Fields as in `Serve`, whose
    values are the defaults of requests without a profile."""

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
    path: str  # folder with adapter_config.json and adapter_model.safetensors
    scale: float = 1.0  # factor on the adapter's own scale
    pinned: bool = False  # never evict the adapter from device memory


def encode_adapters(sources: Sequence[AdapterSource]) -> str:
    """Return the value of `Serve.adapters`; empty for no adapters."""
    return json.dumps([dataclasses.asdict(each) for each in sources], separators=(",", ":")) if sources else ""


def decode_adapters(text: str) -> list[AdapterSource]:
    """Parse a value of `Serve.adapters`. Raises ValueError with a message for the user."""
    try:
        return [AdapterSource(**each) for each in json.loads(text or "[]")]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"adapters: not a JSON array of adapters ({error})") from None


@dataclass(frozen=True, kw_only=True)
class ForkServerOptions(Supervised):
    """Import the libraries once, then fork workers on the router's orders. Started by routers only."""

    orders: int = field(metadata={"help": "Descriptor of the socket (AF_UNIX, SOCK_SEQPACKET) that receives orders."})


Command = Download | Convert | Estimate | Serve | ForkServerOptions
COMMANDS: dict[str, type[Any]] = {
    "download": Download, "convert": Convert, "estimate": Estimate, "serve": Serve, "fork-server": ForkServerOptions,
}  # fmt: skip
VERBS = tuple(COMMANDS)
_VERB_OF = {kind: verb for verb, kind in COMMANDS.items()}


def to_argv(command: Command) -> list[str]:
    """Return verb and options, without defaults. `from_argv` parses them to an equal command."""
    argv = [_VERB_OF[type(command)]]
    for each in dataclasses.fields(command):
        value = getattr(command, each.name)
        if value == each.default:
            continue
        flag = _flag(each.name)
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            argv.append(f"{flag}={','.join(value)}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def from_argv(argv: Sequence[str]) -> Command:
    """Parse `argv`, verb first, with options as `--key=value` or `--key value`.

    Raises ValueError with a message for the user if verb, option or value is unknown.
    """
    if not argv or argv[0] not in COMMANDS:
        raise ValueError(f"unknown verb {argv[0] if argv else ''!r}; one of: {', '.join(VERBS)}")
    command: Command = COMMANDS[argv[0]](**vars(_parser(argv[0]).parse_args(argv[1:])))
    return command


def help_text(verb: str) -> str:
    """The text of `worker VERB --help`; that of `worker --help` for an unknown verb."""
    return _parser(verb).format_help() if verb in COMMANDS else _overview()


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse of Python 3.11 drops the value in `--name=--`.
        return self._get_value(action, "--") if arg_strings == ["--"] else super()._get_values(action, arg_strings)


@functools.cache  # forked workers use that of the fork server, which has parsed such a command line before
def _parser(verb: str) -> _Parser:
    """The parser of the options of a verb. An option that is not given has no value in its namespace."""
    kind = COMMANDS[verb]
    hints = typing.get_type_hints(kind)
    parser = _Parser(
        prog=verb, usage=f"worker {verb} [--option=value ...]", description=inspect.getdoc(kind),
        argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False,
    )  # fmt: skip
    by_routers = parser.add_argument_group("options that routers add")
    for each in dataclasses.fields(kind):
        group = by_routers if hasattr(Supervised, each.name) else parser
        text = each.metadata["help"] + _default(each.default)
        group.add_argument(
            _flag(each.name), required=each.default is dataclasses.MISSING, help=text, **_VALUES[hints[each.name]]
        )
    return parser


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<13}{(kind.__doc__ or '').splitlines()[0]}" for verb, kind in COMMANDS.items())
    return (
        "usage: worker VERB [--option=value ...]\n"
        "       worker VERB --help\n\n"
        "One process that serves one model. Events are JSON lines on stdout; the log goes to stderr.\n\n"
        f"{verbs}\n\n"
        "Example: worker serve --snapshot=FOLDER --listen=tcp:127.0.0.1:9000\n"
        "         curl http://127.0.0.1:9000/v1/chat/completions -d '{\"messages\": [...]}'\n"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(value: Any) -> str:
    """The default of an option in its help."""
    if value is dataclasses.MISSING:
        return " Required."
    if value in ("", False, 0, ()):
        return ""
    return f" [{','.join(value) if isinstance(value, tuple) else value}]"


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


# Arguments of `add_argument` by the type of a field.
_VALUES: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},
    int: {"type": int, "metavar": "N"},
    str: {"metavar": "TEXT"},
    tuple[str, ...]: {"type": _parts, "metavar": "A,B,..."},
}


@dataclass(frozen=True)
class EngineCapabilities:
    """Properties of an engine that the router depends on."""

    forks: bool  # workers may be forked from the fork server
    exclusive: bool  # measures its device while it loads, so no other load may run on that device meanwhile


ENGINES = {"transformers": EngineCapabilities(forks=True, exclusive=False)}
