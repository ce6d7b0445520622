"""Presets: a model that may be loaded, and its settings. Each setting is declared once, as a field of Preset. PURE."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from router.config.lora_rank import USUAL
from router.config.option_types import (
    Choice,
    Devices,
    Flag,
    Integer,
    JsonObject,
    Kind,
    Memory,
    MemoryByDevice,
    Names,
    Number,
    Numbers,
    Seconds,
    Sizes,
    Span,
    Strings,
    Text,
    shown,
)  # fmt: skip
from worker.protocol.argv import ENGINES, AdapterSource

GGUF = "GGUF needs the llama-server engine, which this version does not offer; use a safetensors repository"
REPO = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::([A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
)
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q[0-9]|TQ[0-9]|MXFP4|BF16$|F16$|F32$).*", re.IGNORECASE)
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""No `@` and no slash: it stands behind a model's name, and in paths."""
HUB = "hub:"
"""Before the repository of an adapter whose files are not here yet."""
ALL_DEVICES = 1 << 20
"""The value of `max`, where a number of devices is expected."""
_FLAG = Flag()
_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,191}"
SOURCE, CONTEXT, NUMERICS, PLACEMENT, ADAPTERS, PROMPT, LIFECYCLE, PROCESS = (
    "Source and identity", "Context and batch", "Numerics", "Placement", "Adapters", "Prompt and sampling", "Lifecycle",
    "Process",
)  # fmt: skip
GROUPS = (SOURCE, CONTEXT, NUMERICS, PLACEMENT, ADAPTERS, PROMPT, LIFECYCLE, PROCESS)
_LOAD_FORMAT = Choice(
    ("auto", "safetensors", "dummy"),
    refused={
        "pt": "it would unpickle; convert the weights to safetensors",
        "gguf": "GGUF needs the llama-server engine; use a safetensors repository",
    },
)
_KV_TYPE = Choice(
    ("auto", "f32", "f16", "bf16", "int8", "int4"),
    {
        "float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
        "q8_0": "int8", "q4_0": "int4",
    },
    dict.fromkeys(("q4_1", "iq4_nl", "q5_0", "q5_1"), "int4 and int8 are") | {"fp8": "int8 is"},
)  # fmt: skip
_DTYPE = Choice(
    ("auto", "float32", "float16", "bfloat16"),
    {
        "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16",
        "half": "float16", "bf16": "bfloat16",
    },
)  # fmt: skip
_QUANTIZATION = Choice(
    ("auto", "none", "bnb-8bit", "bnb-4bit", "gptq", "awq", "fp8"),
    refused={"squeezellm": "transformers cannot load it; take a checkpoint quantised with gptq or awq"},
)
_ATTENTION = Choice(
    ("auto", "eager", "sdpa"),
    {
        **dict.fromkeys(("off", "0", "false", "disabled"), "eager"),
        **dict.fromkeys(("on", "1", "true", "enabled", "-1"), "auto"),
    },
    dict.fromkeys(
        ("flash", "flash_attention_2", "flash_attention_3"),
        "leave attention at auto, which uses PyTorch's FlashAttention kernel where the device has one",
    ),
)
_ENABLE_LORA = Choice(
    ("auto", "on", "off"),
    {
        **dict.fromkeys(("true", "1", "yes", "enabled"), "on"),
        **dict.fromkeys(("false", "0", "no", "disabled"), "off"),
    },
)
_ENGINE = Choice(
    tuple(ENGINES),
    {"python": "transformers"},
    dict.fromkeys(("vllm", "llama-server", "command", "mpi"), "transformers is"),
)


class Scope(Enum):
    """The part of the system that uses a setting. Presets with equal settings of scope WORKER share a worker."""

    WORKER = "worker"
    REQUEST = "request"  # the worker uses it for requests by this preset's name
    NAME = "name"  # the router uses it for this preset's name


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of a model: its name in files, flags and variables, and its field of Preset."""

    name: str
    kind: Kind
    field: str = ""
    """Of Preset; empty: read by the loader itself."""
    item: str = ""
    """The member, where that field is a mapping."""
    group: str
    help: str
    unset: str = ""
    """What holds where the field's default only says that nothing was set."""
    also: tuple[str, ...] = ()
    """Other spellings, one letter included."""
    env: tuple[str, ...] = ()
    """Variables of llama-server and LMI whose names do not follow from a spelling."""
    switches: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Flags that mean a value of this key: spelling, then the value if on and if off."""
    halves: tuple[tuple[str, ...], ...] = ()
    """Spellings that each state a part of the value, of which one alone states it all, and several have to agree."""
    own: bool = False
    """Belongs to one model: not in [*], not a flag, not a variable."""
    live: bool = False
    """A running worker goes on when it changes."""
    scope: Scope = Scope.WORKER
    path: bool = False
    """A file or folder; relative ones start where the setting was written."""

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)

    def may_stand_beside(self, one: str, other: str) -> bool:
        """Whether both spellings may be written, as they state different parts of the value."""
        parts = [next((part for part in self.halves if name in part), None) for name in (one, other)]
        return None not in parts and parts[0] != parts[1]


def key(
    default: Any, kind: Kind, group: str, help: str, *, name: str = "", unset: str = "", also: tuple[str, ...] = (),
    env: tuple[str, ...] = (), switches: Mapping[str, tuple[str, str]] | None = None,
    halves: tuple[tuple[str, ...], ...] = (), own: bool = False, live: bool = False, path: bool = False,
    scope: Scope = Scope.WORKER,
) -> Any:  # fmt: skip
    """A field of Preset that is a key. Its name is the name of the field unless given. See `Key` for the arguments."""
    declared = {
        "kind": kind, "group": group, "help": help, "unset": unset, "also": also, "env": env,
        "switches": switches or {}, "halves": halves, "own": own, "live": live, "path": path, "scope": scope,
    }  # fmt: skip
    declared |= {"name": name} if name else {}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=declared)
    return field(default=default, metadata=declared)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model that may be loaded, and the declaration of its settings.

    Bytes are int, times float seconds (-1.0: off).
    """

    id: str
    source: Literal["preset", "models_dir", "cache"] = "preset"

    # The source: exactly one of path, repo, demo
    path: str = ""
    """Absolute path of a snapshot folder."""
    repo: str = ""
    """`org/name` on the hub."""
    demo: str = ""
    """Name of a built-in demo model (`model = demo:NAME`)."""

    # fmt: off
    revision: str = key("main",
            Text("branch, tag or commit", r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}(?<!/)", "is no branch, tag or commit"),
            SOURCE, "which state of the repository", env=("HF_REVISION",), own=True)
    tokenizer: str = key("", Text("folder"), SOURCE, "folder of another tokenizer", unset="the model's", path=True)
    load_format: str = key("auto", _LOAD_FORMAT, SOURCE, "dummy: random weights")
    trust_remote_code: bool = key(False, _FLAG, SOURCE, "run Python code that comes with the model",
            env=("HF_MODEL_TRUST_REMOTE_CODE",))
    dedup_cache_models: bool = key(False, _FLAG, SOURCE,
            "do not list the cached repository of this section a second time: its name means this one", live=True,
            scope=Scope.NAME)
    """Whether the cached repository of this preset is not listed a second time."""
    aliases: tuple[str, ...] = key((), Names(_NAME, "is no model name"), SOURCE, "further names of the model",
            name="alias", unset="none", also=("a", "model-names"), own=True, live=True, scope=Scope.NAME)
    tags: tuple[str, ...] = key((), Names(), SOURCE, "shown in lists; never route", unset="none", live=True,
            scope=Scope.NAME)
    task: Literal["auto", "generate", "embed", "rerank"] = key("auto",
            Choice(("auto", "generate", "embed", "rerank"), {"text-generation": "generate", "text-embedding": "embed"}),
            SOURCE, "auto: by the architecture", env=("LLAMA_ARG_EMBEDDINGS", "LLAMA_ARG_RERANKING"),
            switches={"embedding": ("embed", "auto"), "embeddings": ("embed", "auto"),
                      "reranking": ("rerank", "auto"), "rerank": ("rerank", "auto")})
    pooling: str = key("", Choice(("none", "mean", "cls", "last", "rank"), {"": ""}), SOURCE,
            "how token vectors become one embedding; rank: it is a cross-encoder", unset="the model's")
    embd_normalize: int = key(2, Integer(-1, 1 << 20, unit="-1 none, 0 max, 1 taxicab, 2 euclidean, p"), SOURCE,
            "norm of an embedding")

    ctx_size: int = key(-1, Integer(0, words={"auto": -1}, unit="tokens"), CONTEXT,
            "prompt and answer of one request together; 0: the model's maximum", unset="the model's maximum up to 8192",
            also=("c", "max-model-len"))
    """Tokens per request; -1: the model's maximum up to 8192; 0: the model's maximum."""
    parallel: int = key(4, Integer(1, 4096, {"-1": 4, "auto": 4}), CONTEXT,
            "sequences in one step; memory is kept for all of them",
            also=("np", "max-batch-size", "max-rolling-batch-size", "max-prompts"),
            env=("LLAMA_ARG_N_PARALLEL", "MAX_BATCH_SIZE"))
    kv_tokens: int = key(0, Integer(0, 1 << 40, {"auto": 0}, unit="tokens"), CONTEXT,
            "room of the cache, for all requests together; less makes the youngest wait", unset="ctx-size x parallel")
    """Tokens that the cache has room for; 0: ctx_size x parallel."""
    kv_cache_dtype: str = key("auto", _KV_TYPE, CONTEXT,
            "numbers in which keys and values are kept, one type for both; auto: the model's own; int8 takes half of"
            " 16 bits, int4 a third",
            also=("ctk", "cache-type-k", "ctv", "cache-type-v"), switches={"cache-8bit": ("int8", "auto")},
            halves=(("ctk", "cache-type-k"), ("ctv", "cache-type-v")))
    prefix_caching: bool = key(True, _FLAG, CONTEXT,
            "prompts that begin alike are computed once, where the cache is made of blocks",
            also=("enable-prefix-caching",))
    prefill_chunk: int = key(512, Integer(1, 1 << 20, unit="tokens"), CONTEXT, "of one prompt in one step",
            also=("ub", "ubatch-size"), env=("LLAMA_ARG_UBATCH",))
    max_prefill_tokens: int = key(0, Integer(1, 1 << 20, unit="tokens"), CONTEXT,
            "of all prompts in one step; of this and prefill-chunk the smaller one holds", unset="prefill-chunk",
            also=("b", "batch-size", "max-rolling-batch-prefill-tokens"),
            env=("LLAMA_ARG_BATCH", "MAX_BATCH_PREFILL_TOKENS"))
    """0: `prefill_chunk` alone bounds a step."""
    limit_images: int = key(8, Integer(0, 1024), CONTEXT, "images in one prompt, of a model that takes images; 0: none")
    """Of one prompt."""
    max_input_tokens: int = key(0, Integer(0, unit="tokens"), CONTEXT, "longest prompt", unset="ctx-size - 1",
            also=("max-input-len",))
    n_predict: int = key(-1, Integer(1, words={"-1": -1, "-2": -1}, unit="tokens"), CONTEXT,
            "new tokens where a request states no maximum", unset="to the context's end", also=("n", "predict"),
            scope=Scope.REQUEST)
    queue_size: int = key(1000, Integer(1), CONTEXT, "its waiting requests; the flag of this name bounds all models",
            also=("job-queue-size",), env=("MAX_CONCURRENT_REQUESTS",), live=True)
    max_concurrent: int = key(0, Integer(1, words={"0": 0, "-1": 0}), CONTEXT,
            "requests of this model at once, waiting ones included; more get 429", unset="unlimited", live=True)
    """Requests at once; 0: as many as come."""
    request_timeout: float | None = key(None, Seconds(off=0.0), CONTEXT, "of one request; 0: none", unset="--timeout",
            also=("predict-timeout",), live=True, scope=Scope.NAME)
    """None: --timeout."""

    dtype: str = key("auto", _DTYPE,
            NUMERICS, "auto: the checkpoint's, float32 for float16 on the CPU", also=("torch-dtype",))
    quantization: str = key("auto", _QUANTIZATION,
            NUMERICS, "auto: as the checkpoint is; bnb-8bit, bnb-4bit: linear layers are packed while it is loaded",
            also=("quantize",), env=("HF_MODEL_QUANTIZE",),
            switches={"load-in-8bit": ("bnb-8bit", "auto"), "load-in-4bit": ("bnb-4bit", "auto"),
                      "load-8bit": ("bnb-8bit", "auto")})
    attention: str = key("auto", _ATTENTION,
            NUMERICS, "which implementation; auto: the fastest there is", also=("fa", "flash-attn"))
    threads: int = key(0, Integer(1, 4096, {"-1": 0, "0": 0, "auto": 0}), NUMERICS, "of one worker",
            unset="1 on an accelerator, half the cores on the CPU", also=("t",))
    """0: 1 on an accelerator, half the cores on the CPU."""
    seed: int = key(-1, Integer(-1, (1 << 63) - 1), NUMERICS, "where a request has none; -1: another one each time",
            also=("s",), scope=Scope.REQUEST)
    enforce_eager: bool = key(False, _FLAG, NUMERICS,
            "kernels as torch starts them, in less memory: no CUDA graphs; on the CPU no reordered weights",
            env=("ENABLE_CUDA_GRAPHS",))
    """No CUDA graphs."""
    max_logprobs: int = key(20, Integer(0, 1 << 16), NUMERICS, "alternatives that a request may ask for")

    device: tuple[str, ...] = key((), Devices(), PLACEMENT, "where it may run", unset="auto",
            also=("dev", "mg", "main-gpu", "load-on-devices", "gpus"))
    """`cpu`, `cuda:N` or a UUID; empty: the planner chooses among the accelerators, or the CPU without any."""
    split_mode: Literal["auto", "none", "layer", "tensor"] = key("auto",
            Choice(("auto", "none", "layer", "tensor"), {"row": "tensor"}), PLACEMENT,
            "auto: on one accelerator if it fits there, else its layers on the fewest; layer: on two at least; tensor:"
            " each matrix divided among the fewest, two at least",
            also=("sm",))
    pipeline_parallel: int = key(1, Integer(1, 64, {"max": ALL_DEVICES}), PLACEMENT,
            "accelerators that its layers are split over; max: all", also=("pipeline-parallel-degree",),
            env=("PIPELINE_PARALLEL_DEGREE",))
    """Accelerators that its layers are split over."""
    tensor_parallel: int = key(1, Integer(1, 64, {"max": ALL_DEVICES}), PLACEMENT,
            "accelerators that each of its matrices is divided among, or processes on the CPU; max: all accelerators",
            also=("tp", "tensor-parallel-degree", "num-gpus"), env=("TENSOR_PARALLEL_DEGREE",))
    """Accelerators that each of its matrices is divided among; processes, on main memory."""
    gpu_split: tuple[int, ...] = key((), Sizes(), PLACEMENT,
            "most that it may take of each accelerator, or of the first, the second, ...; 0: none of it",
            unset="all there is", also=("max-gpu-memory", "exllama-gpu-split"))
    """Bytes that it may take: one figure for each accelerator, or one by one."""
    tensor_split: tuple[float, ...] = key((), Numbers(), PLACEMENT,
            "splits it over so many accelerators, its layers in these proportions", unset="by their room", also=("ts",))
    """Proportions of its layers, by accelerator."""
    replicas: tuple[int, int] = key((1, 1), Span(), PLACEMENT,
            "workers of this model, or least and most; further ones come when each has more to do than parallel, where"
            " memory is free",
            also=("num-workers",), live=True)
    """Workers at once: at least, where memory is free for more than one, and at most."""
    replica_idle: float = key(60.0, Seconds(), PLACEMENT,
            "idle time after which a worker beyond the least of replicas ends", name="replica-idle-seconds",
            also=("max-idle-time",), live=True)
    required_memory: Mapping[str, int] = key({}, MemoryByDevice(1), PLACEMENT, "replaces the estimate",
            unset="estimate", also=("required-memory-mb", "gpu.required-memory-mb"))
    """Bytes by device name (`""`: whatever device it runs on); replaces the estimate."""
    reserved_memory: int = key(0, Memory(), PLACEMENT, "added to the estimate on each device",
            also=("reserved-memory-mb",))
    """Bytes added to the estimate on each device."""

    lora: tuple[str, ...] = key((), Names(hint="name=folder or org/name, ..."), ADAPTERS,
            "LoRA adapters that requests may name, as MODEL@NAME or in their bodies", unset="none", own=True, live=True)
    """`name=folder`, or a repository of the hub in its place."""
    lora_scaled: tuple[str, ...] = key((), Names(hint="folder:scale, ..."), ADAPTERS, "the same, each times a scale",
            unset="none", own=True, live=True)
    """The same, with `:scale` behind it."""
    default_lora: str = key("", Text("name"), ADAPTERS, "adapter of requests that name none", unset="none", own=True,
            live=True, scope=Scope.REQUEST)
    adapters_dir: str = key("", Text("folder"), ADAPTERS, "each folder in it is an adapter, by its name",
            unset="adapters/ in the model's folder", own=True, live=True, path=True)
    enable_lora: str = key("auto", _ENABLE_LORA,
            ADAPTERS, "whether memory is kept for adapters; auto: if the model has any when the router reads its files")
    max_loras: int = key(4, Integer(1, 1024), ADAPTERS, "adapters in use at once; memory is kept for all of them")
    max_lora_rank: int = key(USUAL, Integer(1, 4096), ADAPTERS, "largest rank that an adapter may have",
            unset="16, or what the model's own adapters need")
    max_cpu_loras: int = key(0, Integer(0, 1 << 20), ADAPTERS, "adapters whose files stay open beside those in use",
            unset="all")

    config_override: str = key("", JsonObject(), PROMPT, "merged into config.json", unset="none")
    chat_template: str = key("", Text("Jinja text"), PROMPT, "turns messages into a prompt", unset="the tokenizer's",
            scope=Scope.REQUEST)
    chat_template_file: str = key("", Text("file"), PROMPT, "the same, read from a file", unset="none", path=True,
            scope=Scope.REQUEST)
    """Where `chat_template` was read from."""
    chat_template_kwargs: str = key("", JsonObject(), PROMPT, "handed to the template", unset="none",
            env=("LLAMA_CHAT_TEMPLATE_KWARGS",), scope=Scope.REQUEST)

    load_on_startup: bool = key(False, _FLAG, LIFECYCLE, "load when the router starts", live=True, scope=Scope.NAME)
    autoload: bool | None = key(None, _FLAG, LIFECYCLE, "load for a request", unset="--models-autoload", live=True,
            scope=Scope.NAME)
    """None: --models-autoload."""
    pin: bool = key(False, _FLAG, LIFECYCLE, "never evict it", live=True)
    priority: int = key(0, Integer(-1000, 1000), LIFECYCLE, "higher is queued first and evicted last", live=True)
    ttl: float = key(-1.0, Seconds(off=-1.0), LIFECYCLE,
            "idle time after which the worker ends, or its weights are let go", unset="off", also=("keep-alive",),
            live=True)
    prefetch: tuple[str, ...] = key((), Names(), LIFECYCLE,
            "models usually asked for together with this one: read ahead with it, loaded where memory is free",
            unset="none", own=True, live=True)
    """Models that are usually asked for together with this one, by id or alias."""
    sleep_idle: float = key(-1.0, Seconds(off=-1.0), LIFECYCLE,
            "idle time after which the worker ends; its weights stay in main memory, as far as --sleep-memory goes",
            name="sleep-idle-seconds", unset="off", live=True)
    """Like `ttl`; but the weights stay in main memory, within --sleep-memory."""
    idle_grace: float = key(-1.0, Seconds(off=0.0, words={"auto": -1.0}), LIFECYCLE,
            "how long a worker inside its turn is kept for its own next request",
            unset="half the expected load of who waits, 0.2 to 2; 0 if it is hardly ever asked for so soon", live=True)
    """-1.0: half the waiting model's expected load, 0.2 to 2 seconds; 0 if it is hardly ever asked for so soon."""
    min_residency: float = key(-1.0, Seconds(off=0.0, words={"auto": -1.0}), LIFECYCLE,
            "the turn: how long a model in use keeps its place", unset="10, or --swap-patience if less", live=True)
    """The turn; -1.0: 10 seconds, or --swap-patience if less."""
    start_timeout: float = key(240.0, Seconds(low=0.1), LIFECYCLE, "without load progress",
            also=("model-loading-timeout",), live=True)
    stop_timeout: float = key(10.0, Seconds(), LIFECYCLE, "from SIGTERM to SIGKILL", live=True)
    stall_timeout: float = key(120.0, Seconds(low=0.1), LIFECYCLE, "without a pulse, or at work without a step",
            also=("chunked-read-timeout",), live=True)
    max_restarts: int = key(3, Integer(0, 1000), LIFECYCLE, "crashes in 10 minutes before pauses grow",
            also=("retry-threshold",), live=True)

    engine: str = key("transformers", _ENGINE, PROCESS, "what computes the tokens")
    python: str = key("", Text("interpreter"), PROCESS, "of the worker", unset="the router's", path=True)
    # fmt: on

    adapters: tuple[AdapterSource, ...] = ()
    """All that requests may name: of the keys above, and those that came by a call. The path of one that is on the hub
    is `hub:org/name:revision` until its files are here."""
    sampling: Mapping[str, float | int | str | tuple[str, ...]] = field(default_factory=dict)
    """Defaults for requests, by key: temp, top-k, top-p, min-p, repeat-penalty, repeat-last-n, presence-penalty,
    frequency-penalty, stop."""
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


# Keys that are no field of their own: the source, members of `sampling` and `env`, another spelling of `device`.
_OTHER_KEYS: tuple[Key, ...] = (
    Key(name="model", kind=Text("folder, org/name or demo:NAME"), group=SOURCE, also=("m", "model-path", "model-id"),
        env=("HF_MODEL_ID",), own=True,
        help="folder with config.json and safetensors files, repository of the hub, or built-in model"),
    Key(name="hf-repo", kind=Text("org/name[:revision]"), group=SOURCE, also=("hf", "hfr"), own=True,
        help="repository of the hub"),
    Key(name="n-gpu-layers", kind=Integer(0, 1 << 20, {"auto": 1 << 20, "all": 1 << 20, "-1": 1 << 20, "-2": 1 << 20}),
        group=PLACEMENT, also=("ngl", "gpu-layers"), help="0: device = cpu; all, auto or 99 and more: all layers"),
    *(
        Key(name=name, kind=kind, field="sampling", item=name, group=PROMPT, scope=Scope.REQUEST, also=also, env=env,
            help=help, unset="the model's, then the API's")
        for name, kind, also, env, help in (
            ("temp", Number(0.0, 100.0), ("temperature",), (), "0: greedy"),
            ("top-k", Integer(0), (), (), "likeliest tokens to keep; 0: all"),
            ("top-p", Number(0.0, 1.0), (), (), "likeliest set to keep"),
            ("min-p", Number(0.0, 1.0), (), (), "of the likeliest token's probability"),
            ("repeat-penalty", Number(0.01, 100.0), ("repetition-penalty",), (), "1: none"),
            ("repeat-last-n", Integer(-1), (), (), "tokens that penalties look back at; -1: all"),
            ("presence-penalty", Number(-100.0, 100.0), (), (), "once per token seen"),
            ("frequency-penalty", Number(-100.0, 100.0), (), (), "per occurrence"),
            ("stop", Strings(), ("stop-sequence", "stop-character"), (), "strings that end an answer"),
        )
    ),
    Key(name="env", kind=Text("K=V,K=V"), group=PROCESS, unset="none",
        help="environment of the worker beside the allow-list; or one env.NAME = value each"),
)  # fmt: skip
_FIELD_KEYS = (
    Key(**{"field": each.name, "name": each.name.replace("_", "-"), **each.metadata})
    for each in dataclasses.fields(Preset)
    if each.metadata
)
KEYS: tuple[Key, ...] = tuple(sorted((*_OTHER_KEYS, *_FIELD_KEYS), key=lambda key: GROUPS.index(key.group)))
"""All settings of a model, in the order of the reference."""
_LIVE_FIELDS = {key.field for key in KEYS if key.live} | {"source", "chat_template_file", "origins", "adapters"}
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
