"""The command line of a worker: one frozen dataclass for each verb, and the engines that a worker may run.

The router starts `python -m worker VERB --options`. The options are the fields of the verb's dataclass. The string
under a field is its text in `worker VERB --help`, and the docstring of the class is the text of the verb.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Download:
    """Download one snapshot and print its folder. The only verb that may use the network."""

    repo: str = ""
    """`org/name` on the hub; empty with `demo`."""
    revision: str = "main"
    demo: str = ""
    """Name of a built-in model to create instead of downloading one."""
    target: str = ""
    """Folder in which a `demo` model is created."""
    cache: str = ""
    """Hub cache folder; empty: the hub library's own default."""
    adapter: bool = False
    """The repository contains a LoRA adapter: download only the adapter's files."""
    supervised: bool = False
    parent_pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert weights and tokenizer of a snapshot to the form that the engine uses, so that loads need not. Write them
    to a folder that is a snapshot too. Runs at the lowest CPU and disk priority."""

    snapshot: str
    """Folder with config.json, tokenizer and safetensors files."""
    target: str
    """Folder to create. Files that need no conversion become links. If nothing needs conversion, only the manifest is
    written."""
    threads: int = 1
    """torch threads of this process."""
    supervised: bool = False
    parent_pid: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that decide the memory and the output of a model: shared by `estimate` and `serve`."""

    snapshot: str
    """Folder with config.json, tokenizer and safetensors files."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty: the snapshot."""
    task: str = "auto"
    """auto, generate, embed or rerank."""
    devices: tuple[str, ...] = ("cpu",)
    """Device of each shard, numbered as the worker sees them: `cpu`, `cuda:0`. The router hides all other devices."""
    layers: tuple[str, ...] = ()
    """Layer split: number of layers on each of several devices, in order; none: one device."""
    tensor_parallel: int = 1
    """Number of tensor-parallel ranks (processes): one for each device, or all of them on the CPU."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16. auto: the type of the checkpoint; on the CPU float16 becomes float32."""
    quantization: str = "auto"
    load_format: str = "auto"
    """auto, safetensors or dummy (random weights)."""
    trust_remote_code: bool = False
    config_override: str = ""
    """JSON object merged into config.json."""
    rope: str = ""
    """JSON object of RoPE keys, as in a preset (`rope-scale`, `alpha-value`, ...)."""
    attention: str = "auto"
    """auto, eager or sdpa."""
    enforce_eager: bool = False
    """Do not record CUDA graphs. On the CPU: use torch's kernels for linear layers and do not reorder weights."""
    ctx_size: int = 0
    """Context length of one request in tokens, prompt and completion together; 0: the model's maximum."""
    parallel: int = 4
    """Maximum number of sequences in one step."""
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens, over all sequences; 0: ctx_size x parallel."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache: auto (the type of the model), f32, f16, bf16, int8 or int4. Does not apply to the states of
    state-space layers."""
    draft_max: int = 16
    """Speculative decoding: maximum number of tokens that are drafted for one sequence in one step."""
    draft_snapshot: str = ""
    """Folder of the draft model; empty: none."""
    ngram_size: int = 0
    """Draft by prompt lookup: number of newest tokens that are looked up in the text; 0: no prompt lookup."""
    prefill_chunk: int = 512
    """Maximum number of prompt tokens of one sequence in one step (chunked prefill)."""
    max_loras: int = 0
    """LoRA adapters in device memory at once; 0: adapters are disabled."""
    max_lora_rank: int = 16
    """Largest LoRA rank of an adapter."""
    limit_images: int = 8
    """Maximum number of images in one prompt of a vision model; 0: none."""
    threads: int = 1
    """torch threads of this process, or of each rank."""
    overhead: int = 0
    """Process overhead in bytes on each accelerator, outside torch's allocator (context, libraries), as measured by an
    earlier worker; 0: not measured yet, a constant is used."""

    @property
    def speculates(self) -> bool:
        """True if tokens are drafted (speculative decoding)."""
        return self.draft_max > 0 and (self.ngram_size > 0 or bool(self.draft_snapshot))


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelOptions):
    """Estimate the memory that `serve` needs with the same options, without reading weights."""

    host_overhead: int = 0
    """Process overhead in bytes of main memory for a process, or for each rank, that uses accelerators, as measured by
    an earlier worker; 0: not measured yet, a constant is used. On the CPU the estimating process measures itself."""
    supervised: bool = False
    parent_pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Load a model without network access and serve it over HTTP."""

    listen: str
    """Address: `unix:PATH` or `tcp:HOST:PORT`; port 0: any free port."""
    name: str = ""
    """Id of the model in responses to requests that name no model."""
    reserved: str = ""
    """Reservation, a JSON object of bytes by device name; empty: no limit."""
    prefix_caching: bool = True
    """Reuse the KV cache of earlier requests that begin with the same tokens. Paged caches only."""
    max_input_tokens: int = 0
    """Longest prompt in tokens; 0: ctx_size - 1."""
    n_predict: int = -1
    """New tokens of a request that states no maximum; -1: up to the end of the context."""
    draft_min: int = 0
    """Shortest draft that is worth a step."""
    queue_size: int = 1000
    """Maximum number of requests that wait for a place in the batch."""
    adapters: str = ""
    """JSON array of AdapterSource: the adapters that requests may name, until the router replaces the list."""
    default_adapter: str = ""
    """Adapter of requests that name none; empty: no adapter."""
    max_cpu_loras: int = 0
    """Number of adapters whose files stay open; 0: all."""
    max_logprobs: int = 20
    warm_up: bool = True
    """On an accelerator, run the largest step before reporting readiness, so that its memory is measured. Not needed
    where earlier loads have measured it."""
    seed: int = -1
    """Seed of requests that have none; -1: random."""
    sampling: str = ""
    """JSON object of sampling defaults, keys as in a preset (`temp`, `top-k`, ...)."""
    pooling: str = ""
    """none (one vector for each token), mean, cls, last or rank (cross-encoder); empty: as the model is configured."""
    embd_normalize: int = 2
    chat_template: str = ""
    """Jinja text of the chat template; empty: the tokenizer's template."""
    chat_template_kwargs: str = ""
    """JSON object of variables for the chat template."""
    strict_fields: bool = False
    prepare: bool = False
    """Early start: do the part of the load that needs neither weights nor devices, report `prepared`, and wait for a
    MemoryGrant on stdin. Until then `devices` names only the kind of device."""
    supervised: bool = False
    parent_pid: int = 0


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
    path: str
    """Folder with adapter_config.json and adapter_model.safetensors."""
    scale: float = 1.0
    """Factor on the adapter's own scale."""
    pinned: bool = False
    """Never evict the adapter from device memory."""


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
class ForkServerOptions:
    """Import the libraries once, then fork workers on the router's orders. Started by routers only."""

    orders: int
    """Descriptor of the socket (AF_UNIX, SOCK_SEQPACKET) that receives orders."""
    supervised: bool = False
    parent_pid: int = 0


Command = Download | Convert | Estimate | Serve | ForkServerOptions
COMMANDS: dict[str, type[Any]] = {
    "download": Download, "convert": Convert, "estimate": Estimate, "serve": Serve, "fork-server": ForkServerOptions,
}  # fmt: skip
VERBS = tuple(COMMANDS)
_VERB_OF = {kind: verb for verb, kind in COMMANDS.items()}


def to_argv(command: Command) -> list[str]:
    """Return verb and options, without defaults. `from_argv` parses them to an equal command."""
    argv = [_VERB_OF[type(command)]]
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
    """Parse `argv`, verb first, with options as `--key=value` or `--key value`.

    Raises ValueError with a message for the user if verb, option or value is unknown.
    """
    if not argv or argv[0] not in COMMANDS:
        raise ValueError(f"unknown verb {argv[0] if argv else ''!r}; one of: {', '.join(VERBS)}")
    kind = COMMANDS[argv[0]]
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
                raise ValueError(f"{argv[0]}: {word!r} takes no value; use --{flag} or --no-{flag}")
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
class EngineCapabilities:
    """Properties of an engine that the router depends on."""

    forks: bool  # workers may be forked from the fork server
    exclusive: bool  # measures its device while it loads, so no other load may run on that device meanwhile


ENGINES = {"transformers": EngineCapabilities(forks=True, exclusive=False)}
