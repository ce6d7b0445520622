"""The keys of a preset, each written once: spelling, type, range, where it goes in `Preset`.

Four classes of words: keys (`KEYS`), words of the format that this version does not build (`REFUSED`), options of
llama-server and LMI that have no meaning here (`MEANINGLESS`), and all others, which nobody knows. Law: PURE.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.values import (
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
)  # fmt: skip
from worker.protocol.argv import ENGINES

DEMOS = ("chat", "embed", "a", "b", "c")
"""What `model = demo:NAME` may name."""
ALL_DEVICES = 1 << 20
"""What `max` stands for, where a number of devices is wanted."""
_FLAG = Flag()
_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,191}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_OVERRIDE = "write the model's own config.json members into config-override"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of a model."""

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
    path: bool = False
    """A file or folder; relative ones start where the setting was written."""

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)

    def may_stand_beside(self, one: str, other: str) -> bool:
        """Whether both spellings may be written, as they state different parts of the value."""
        parts = [next((part for part in self.halves if name in part), None) for name in (one, other)]
        return None not in parts and parts[0] != parts[1]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A key that is known but not built; `neutral` values describe what happens anyway and are accepted."""

    name: str
    instead: str = ""
    also: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    neutral: frozenset[str] = frozenset()
    is_flag: bool = False

    def accepts(self, text: str) -> bool:
        return not text.strip() or text.strip().lower() in self.neutral

    @property
    def message(self) -> str:
        return f"{self.name} is not offered by this version: remove it" + (f"; {self.instead}" if self.instead else "")


@dataclass(frozen=True, kw_only=True)
class Meaningless:
    """An option of another server that does nothing here."""

    name: str
    is_flag: bool = False


Word = Key | Refused | Meaningless

SOURCE, CONTEXT, NUMERICS, PLACEMENT, ADAPTERS, PROMPT, LIFECYCLE, PROCESS = (
    "Source and identity", "Context and batch", "Numerics", "Placement", "Adapters", "Prompt and sampling", "Lifecycle",
    "Process",
)  # fmt: skip

KEYS: tuple[Key, ...] = (
    Key(name="model", kind=Text("folder, org/name or demo:NAME"), group=SOURCE, also=("m", "model-path", "model-id"),
        env=("HF_MODEL_ID",), own=True,
        help="folder with config.json and safetensors files, repository of the hub, or built-in model"),
    Key(name="hf-repo", kind=Text("org/name[:revision]"), group=SOURCE, also=("hf", "hfr"), own=True,
        help="repository of the hub"),
    Key(name="revision", kind=Text("branch, tag or commit", r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}(?<!/)",
        "is no branch, tag or commit"), field="revision", group=SOURCE, env=("HF_REVISION",), own=True,
        help="which state of the repository"),
    Key(name="tokenizer", kind=Text("folder"), field="tokenizer", group=SOURCE, unset="the model's", path=True,
        help="folder of another tokenizer"),
    Key(name="load-format", kind=Choice(("auto", "safetensors", "dummy"), refused={
        "pt": "it would unpickle; convert the weights to safetensors",
        "gguf": "GGUF needs the llama-server engine; use a safetensors repository"}),
        field="load_format", group=SOURCE, help="dummy: random weights"),
    Key(name="trust-remote-code", kind=_FLAG, field="trust_remote_code", group=SOURCE,
        env=("HF_MODEL_TRUST_REMOTE_CODE",), help="run Python code that comes with the model"),
    Key(name="dedup-cache-models", kind=_FLAG, field="dedup_cache_models", group=SOURCE, live=True,
        help="do not list the cached repository of this section a second time: its name means this one"),
    Key(name="alias", kind=Names(_NAME, "is no model name"), field="aliases", group=SOURCE, also=("a", "model-names"),
        own=True, live=True, unset="none", help="further names of the model"),
    Key(name="tags", kind=Names(), field="tags", group=SOURCE, live=True, unset="none",
        help="shown in lists; never route"),
    Key(name="task", kind=Choice(("auto", "generate", "embed", "rerank"),
        {"text-generation": "generate", "text-embedding": "embed"}),
        field="task", group=SOURCE, env=("LLAMA_ARG_EMBEDDINGS", "LLAMA_ARG_RERANKING"),
        switches={"embedding": ("embed", "auto"), "embeddings": ("embed", "auto"), "reranking": ("rerank", "auto"),
                  "rerank": ("rerank", "auto")}, help="auto: by the architecture"),
    Key(name="pooling", kind=Choice(("none", "mean", "cls", "last", "rank"), {"": ""}),
        field="pooling", group=SOURCE, unset="the model's",
        help="how token vectors become one embedding; rank: it is a cross-encoder"),
    Key(name="embd-normalize", kind=Integer(-1, 1 << 20, unit="-1 none, 0 max, 1 taxicab, 2 euclidean, p"),
        field="embd_normalize", group=SOURCE, help="norm of an embedding"),

    Key(name="ctx-size", kind=Integer(0, words={"auto": -1}, unit="tokens"), field="ctx_size", group=CONTEXT,
        also=("c", "max-model-len"), unset="the model's maximum up to 8192",
        help="prompt and answer of one request together; 0: the model's maximum"),
    Key(name="parallel", kind=Integer(1, 4096, {"-1": 4, "auto": 4}), field="parallel", group=CONTEXT,
        also=("np", "max-batch-size", "max-rolling-batch-size", "max-prompts"),
        env=("LLAMA_ARG_N_PARALLEL", "MAX_BATCH_SIZE"), help="sequences in one step; memory is kept for all of them"),
    Key(name="kv-tokens", kind=Integer(0, 1 << 40, {"auto": 0}, unit="tokens"), field="kv_tokens", group=CONTEXT,
        unset="ctx-size x parallel", help="room of the cache, for all requests together; less makes the youngest wait"),
    Key(name="kv-cache-dtype", kind=Choice(("auto", "f32", "f16", "bf16", "int8", "int4"), {
        "float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
        "q8_0": "int8", "q4_0": "int4"}, dict.fromkeys(("q4_1", "iq4_nl", "q5_0", "q5_1"), "int4 and int8 are")
        | {"fp8": "int8 is"}), field="kv_cache_dtype", group=CONTEXT,
        also=("ctk", "cache-type-k", "ctv", "cache-type-v"), halves=(("ctk", "cache-type-k"), ("ctv", "cache-type-v")),
        switches={"cache-8bit": ("int8", "auto")},
        help="numbers in which keys and values are kept, one type for both; auto: the model's own; int8 takes half of"
        " 16 bits, int4 a third"),
    Key(name="prefix-caching", kind=_FLAG, field="prefix_caching", group=CONTEXT, also=("enable-prefix-caching",),
        help="prompts that begin alike are computed once, where the cache is made of blocks"),
    Key(name="prefill-chunk", kind=Integer(1, 1 << 20, unit="tokens"), field="prefill_chunk", group=CONTEXT,
        also=("ub", "ubatch-size"), env=("LLAMA_ARG_UBATCH",), help="of one prompt in one step"),
    Key(name="max-prefill-tokens", kind=Integer(1, 1 << 20, unit="tokens"), field="max_prefill_tokens", group=CONTEXT,
        also=("b", "batch-size", "max-rolling-batch-prefill-tokens"),
        env=("LLAMA_ARG_BATCH", "MAX_BATCH_PREFILL_TOKENS"),
        unset="prefill-chunk", help="of all prompts in one step; of this and prefill-chunk the smaller one holds"),
    Key(name="limit-images", kind=Integer(0, 1024), field="limit_images", group=CONTEXT,
        help="images in one prompt, of a model that takes images; 0: none"),
    Key(name="max-input-tokens", kind=Integer(0, unit="tokens"), field="max_input_tokens", group=CONTEXT,
        also=("max-input-len",), unset="ctx-size - 1", help="longest prompt"),
    Key(name="n-predict", kind=Integer(1, words={"-1": -1, "-2": -1}, unit="tokens"), field="n_predict", group=CONTEXT,
        also=("n", "predict"), unset="to the context's end", help="new tokens where a request states no maximum"),
    Key(name="queue-size", kind=Integer(1), field="queue_size", group=CONTEXT, also=("job-queue-size",), live=True,
        env=("MAX_CONCURRENT_REQUESTS",), help="its waiting requests; the flag of this name bounds all models"),
    Key(name="max-concurrent", kind=Integer(1, words={"0": 0, "-1": 0}), field="max_concurrent", group=CONTEXT,
        live=True, unset="unlimited", help="requests of this model at once, waiting ones included; more get 429"),
    Key(name="request-timeout", kind=Seconds(off=0.0), field="request_timeout", group=CONTEXT,
        also=("predict-timeout",), live=True, unset="--timeout", help="of one request; 0: none"),

    Key(name="dtype", kind=Choice(("auto", "float32", "float16", "bfloat16"), {
        "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16",
        "half": "float16", "bf16": "bfloat16"}), field="dtype", group=NUMERICS, also=("torch-dtype",),
        help="auto: the checkpoint's, float32 for float16 on the CPU"),
    Key(name="quantization", kind=Choice(("auto", "none", "bnb-8bit", "bnb-4bit", "gptq", "awq", "fp8"), refused={
        "squeezellm": "transformers cannot load it; take a checkpoint quantised with gptq or awq"}),
        field="quantization", group=NUMERICS, also=("quantize",), env=("HF_MODEL_QUANTIZE",),
        help="auto: as the checkpoint is; bnb-8bit, bnb-4bit: linear layers are packed while it is loaded",
        switches={"load-in-8bit": ("bnb-8bit", "auto"), "load-in-4bit": ("bnb-4bit", "auto"),
                  "load-8bit": ("bnb-8bit", "auto")}),
    Key(name="attention", kind=Choice(("auto", "eager", "sdpa", "flash"), {"off": "eager", "0": "eager",
        "false": "eager", "disabled": "eager", "on": "auto", "1": "auto", "true": "auto", "enabled": "auto",
        "-1": "auto"}), field="attention", group=NUMERICS, also=("fa", "flash-attn"),
        help="which implementation; auto: the fastest there is"),
    Key(name="threads", kind=Integer(1, 4096, {"-1": 0, "0": 0, "auto": 0}), field="threads", group=NUMERICS,
        also=("t",), unset="1 on an accelerator, half the cores on the CPU", help="of one worker"),
    Key(name="seed", kind=Integer(-1, (1 << 63) - 1), field="seed", group=NUMERICS, also=("s",),
        help="where a request has none; -1: another one each time"),
    Key(name="enforce-eager", kind=_FLAG, field="enforce_eager", group=NUMERICS, env=("ENABLE_CUDA_GRAPHS",),
        help="kernels as torch starts them, in less memory: no CUDA graphs; on the CPU no reordered weights"),
    Key(name="max-logprobs", kind=Integer(0, 1 << 16), field="max_logprobs", group=NUMERICS,
        help="alternatives that a request may ask for"),

    Key(name="device", kind=Devices(), field="device", group=PLACEMENT,
        also=("dev", "mg", "main-gpu", "load-on-devices", "gpus"), unset="auto", help="where it may run"),
    Key(name="n-gpu-layers", kind=Integer(0, 1 << 20, {"auto": 1 << 20, "all": 1 << 20, "-1": 1 << 20, "-2": 1 << 20}),
        group=PLACEMENT, also=("ngl", "gpu-layers"), help="0: device = cpu; all, auto or 99 and more: all layers"),
    Key(name="split-mode", kind=Choice(("auto", "none", "layer", "tensor"), {"row": "tensor"}), field="split_mode",
        group=PLACEMENT, also=("sm",),
        help="auto: on one accelerator if it fits there, else its layers on the fewest; layer: on two at least; tensor:"
        " each matrix divided among the fewest, two at least"),
    Key(name="pipeline-parallel", kind=Integer(1, 64, {"max": ALL_DEVICES}), field="pipeline_parallel",
        group=PLACEMENT, also=("pipeline-parallel-degree",), env=("PIPELINE_PARALLEL_DEGREE",),
        help="accelerators that its layers are split over; max: all"),
    Key(name="tensor-parallel", kind=Integer(1, 64, {"max": ALL_DEVICES}), field="tensor_parallel",
        group=PLACEMENT, also=("tp", "tensor-parallel-degree", "num-gpus"), env=("TENSOR_PARALLEL_DEGREE",),
        help="accelerators that each of its matrices is divided among, or processes on the CPU; max: all accelerators"),
    Key(name="gpu-split", kind=Sizes(), field="gpu_split", group=PLACEMENT,
        also=("max-gpu-memory", "exllama-gpu-split"), unset="all there is",
        help="most that it may take of each accelerator, or of the first, the second, ...; 0: none of it"),
    Key(name="tensor-split", kind=Numbers(), field="tensor_split", group=PLACEMENT, also=("ts",),
        unset="by their room", help="splits it over so many accelerators, its layers in these proportions"),
    Key(name="replicas", kind=Span(), field="replicas", group=PLACEMENT, also=("num-workers",), live=True,
        help="workers of this model, or least and most; further ones come when each has more to do than parallel, where"
        " memory is free"),
    Key(name="replica-idle-seconds", kind=Seconds(), field="replica_idle", group=PLACEMENT, also=("max-idle-time",),
        live=True, help="idle time after which a worker beyond the least of replicas ends"),
    Key(name="required-memory", kind=MemoryByDevice(1), field="required_memory", group=PLACEMENT,
        also=("required-memory-mb", "gpu.required-memory-mb"), unset="estimate", help="replaces the estimate"),
    Key(name="reserved-memory", kind=Memory(), field="reserved_memory", group=PLACEMENT, also=("reserved-memory-mb",),
        help="added to the estimate on each device"),

    Key(name="lora", kind=Names(hint="name=folder or org/name, ..."), field="lora", group=ADAPTERS, own=True, live=True,
        unset="none", help="LoRA adapters that requests may name, as MODEL@NAME or in their bodies"),
    Key(name="lora-scaled", kind=Names(hint="folder:scale, ..."), field="lora_scaled", group=ADAPTERS, own=True,
        live=True, unset="none", help="the same, each times a scale"),
    Key(name="default-lora", kind=Text("name"), field="default_lora", group=ADAPTERS, own=True, live=True, unset="none",
        help="adapter of requests that name none"),
    Key(name="adapters-dir", kind=Text("folder"), field="adapters_dir", group=ADAPTERS, own=True, live=True, path=True,
        unset="adapters/ in the model's folder", help="each folder in it is an adapter, by its name"),
    Key(name="enable-lora", kind=Choice(("auto", "on", "off"), {"true": "on", "1": "on", "yes": "on", "enabled": "on",
        "false": "off", "0": "off", "no": "off", "disabled": "off"}), field="enable_lora", group=ADAPTERS,
        help="whether memory is kept for adapters; auto: if the model has any when the router reads its files"),
    Key(name="max-loras", kind=Integer(1, 1024), field="max_loras", group=ADAPTERS,
        help="adapters in use at once; memory is kept for all of them"),
    Key(name="max-lora-rank", kind=Integer(1, 4096), field="max_lora_rank", group=ADAPTERS,
        unset="16, or what the model's own adapters need", help="largest rank that an adapter may have"),
    Key(name="max-cpu-loras", kind=Integer(0, 1 << 20), field="max_cpu_loras", group=ADAPTERS, unset="all",
        help="adapters whose files stay open beside those in use"),

    Key(name="config-override", kind=JsonObject(), field="config_override", group=PROMPT, unset="none",
        help="merged into config.json"),
    Key(name="chat-template", kind=Text("Jinja text"), field="chat_template", group=PROMPT, unset="the tokenizer's",
        help="turns messages into a prompt"),
    Key(name="chat-template-file", kind=Text("file"), field="chat_template_file", group=PROMPT, path=True, unset="none",
        help="the same, read from a file"),
    Key(name="chat-template-kwargs", kind=JsonObject(), field="chat_template_kwargs", group=PROMPT, unset="none",
        env=("LLAMA_CHAT_TEMPLATE_KWARGS",), help="handed to the template"),
    *(
        Key(name=name, kind=kind, field="sampling", item=name, group=PROMPT, also=also, env=env, help=help,
            unset="the model's, then the API's")
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

    Key(name="load-on-startup", kind=_FLAG, field="load_on_startup", group=LIFECYCLE, live=True,
        help="load when the router starts"),
    Key(name="autoload", kind=_FLAG, field="autoload", group=LIFECYCLE, live=True, unset="--models-autoload",
        help="load for a request"),
    Key(name="pin", kind=_FLAG, field="pin", group=LIFECYCLE, live=True, help="never evict it"),
    Key(name="priority", kind=Integer(-1000, 1000), field="priority", group=LIFECYCLE, live=True,
        help="higher is queued first and evicted last"),
    Key(name="ttl", kind=Seconds(off=-1.0), field="ttl", group=LIFECYCLE, unset="off",
        also=("keep-alive",), live=True, help="idle time after which the worker ends, or its weights are let go"),
    Key(name="companions", kind=Names(), field="companions", group=LIFECYCLE, own=True, live=True, unset="none",
        help="models usually asked for together with this one: read ahead with it, loaded where memory is free"),
    Key(name="sleep-idle-seconds", kind=Seconds(off=-1.0), field="sleep_idle", group=LIFECYCLE, unset="off", live=True,
        help="idle time after which the worker ends; its weights stay in main memory, as far as --sleep-memory goes"),
    Key(name="linger", kind=Seconds(off=0.0, words={"auto": -1.0}), field="linger", group=LIFECYCLE, live=True,
        unset="half the expected load of who waits, 0.2 to 2; 0 if it is hardly ever asked for so soon",
        help="how long a worker inside its turn is kept for its own next request"),
    Key(name="min-residency", kind=Seconds(off=0.0, words={"auto": -1.0}), field="min_residency", group=LIFECYCLE,
        live=True, unset="10, or --swap-patience if less", help="the turn: how long a model in use keeps its place"),
    Key(name="start-timeout", kind=Seconds(low=0.1), field="start_timeout", group=LIFECYCLE, live=True,
        also=("model-loading-timeout",), help="without load progress"),
    Key(name="stop-timeout", kind=Seconds(), field="stop_timeout", group=LIFECYCLE, live=True,
        help="from SIGTERM to SIGKILL"),
    Key(name="stall-timeout", kind=Seconds(low=0.1), field="stall_timeout", group=LIFECYCLE, live=True,
        also=("chunked-read-timeout",), help="without a pulse, or at work without a step"),
    Key(name="max-restarts", kind=Integer(0, 1000), field="max_restarts", group=LIFECYCLE, live=True,
        also=("retry-threshold",), help="crashes in 10 minutes before pauses grow"),

    Key(name="engine", kind=Choice(tuple(ENGINES), {"python": "transformers"}, dict.fromkeys(
        ("vllm", "llama-server", "command", "mpi"), "transformers is")), field="engine", group=PROCESS,
        help="what computes the tokens"),
    Key(name="python", kind=Text("interpreter"), field="python", group=PROCESS, unset="the router's", path=True,
        help="of the worker"),
    Key(name="env", kind=Text("K=V,K=V"), group=PROCESS, unset="none",
        help="environment of the worker beside the allow-list; or one env.NAME = value each"),
)  # fmt: skip


def _refused(name: str, instead: str = "", *also: str, neutral: str = "", flag: bool = False, env: str = "") -> Refused:
    """`neutral` and `env` with blanks between."""
    return Refused(name=name, instead=instead, also=also, neutral=frozenset(neutral.split()), is_flag=flag,
                   env=tuple(env.split()))  # fmt: skip


_OFF = "off false no disabled 0 none"
_ON = "on true yes enabled 1 auto"
_DOWNLOAD = "download the model and write model = its folder, or hf-repo = org/name"
_DRAFT = "answers are the same without a draft model"
_FIT = "choose ctx-size and parallel yourself"

REFUSED: tuple[Refused, ...] = (
    _refused("hf-file", "it names a GGUF file; use a safetensors repository", "hff"),
    _refused("model-url", _DOWNLOAD, "mu"),
    _refused("docker-repo", _DOWNLOAD, "dr"),
    _refused("import", "write the model's settings as a section"),
    _refused("cont-batching", "parallel = 1 gives one sequence at a time", "cb", neutral=_ON, flag=True),
    _refused("cpu-offload", "device = cpu keeps all of it in host memory", "cpu-offload-gb-per-gpu", neutral="0"),
    _refused("min-workers", "write replicas = MIN-MAX", "max-workers", "minWorkers", "maxWorkers", neutral="1"),
    _refused("gpu-balance", "the emptiest device is taken first", neutral=_ON, flag=True),
    _refused("gpu-memory-utilization", "kv-tokens sizes the cache; see --models-memory-margin"),
    _refused("fit", _FIT, neutral=_OFF),
    _refused("fit-ctx", _FIT, "fitc", neutral="4096"),
    _refused("fit-target", "--models-memory-margin keeps memory free", "fitt"),
    _refused("model-draft", _DRAFT, "md", "spec-draft-model", "speculative-draft-model"),
    _refused("hf-repo-draft", _DRAFT, "hfd", "hfrd", "spec-draft-hf", env="LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    _refused("draft-max", _DRAFT, "spec-draft-n-max", "speculative-length", "draft", "draft-n"),
    _refused("draft-min", _DRAFT, "spec-draft-n-min", "draft-n-min"),
    _refused("record-acceptance-rate", _DRAFT, neutral=_OFF, flag=True),
    _refused("rope-scaling", _OVERRIDE, env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _refused("rope-scale", _OVERRIDE, "compress-pos-emb"),
    _refused("rope-freq-base", _OVERRIDE),
    _refused("rope-freq-scale", _OVERRIDE),
    _refused("alpha-value", _OVERRIDE),
    _refused("yarn-orig-ctx", _OVERRIDE),
    _refused("yarn-ext-factor", _OVERRIDE),
    _refused("yarn-attn-factor", _OVERRIDE),
    _refused("yarn-beta-slow", _OVERRIDE),
    _refused("yarn-beta-fast", _OVERRIDE),
    _refused("num-experts", 'config-override = {"num_experts_per_tok": N} does it'),
    _refused("conv-template", "write the template into chat-template or chat-template-file"),
    _refused("response-template", "tool calls and reasoning stay in the text", "tool-call-parser", "reasoning-parser",
             neutral="none"),
    _refused("reasoning", 'chat-template-kwargs = {"enable_thinking": false} turns it off for many models', "rea",
             neutral="auto"),
    _refused("reasoning-format", "reasoning stays in the text", neutral="none", env="LLAMA_ARG_THINK"),
    _refused("output-formatter"),
    _refused("tgi-compat", neutral=_OFF, flag=True),
    _refused("stream-interval", "each token is sent when it is there", neutral="1"),
    _refused("cmd", "transformers is the only engine"),
    _refused("extra-args", "the transformers engine takes none"),
    _refused("embiggen", flag=True, neutral=_OFF),
    _refused("managed", flag=True, neutral=_OFF),
)  # fmt: skip

# What llama-server's and LMI's own documentation lists beside the above. Switches, then options with a value.
_MEANINGLESS_FLAGS = """
swa-full perf escape e kv-offload kvo nkvo repack nr no-host mlock mmap direct-io dio cpu-moe cmoe check-tensors
op-offload ignore-eos backend-sampling bs kv-unified kvu context-shift special sp warmup spm-infill mmproj-auto
mmproj-offload jinja prefill-assistant cache-prompt cache-idle-slots lora-init-without-apply skip-chat-parsing metrics
props reuse-port webui ui-mcp-proxy webui-mcp-proxy agent ag reasoning-preserve log-disable log-jsonl log-prefix
log-timestamps verbose v log-verbose cors-credentials no-ui spec-default spec-draft-backend-sampling spec-draft-cpu-moe
cmoed cpu-moe-draft enable-chunked-prefill enable-streaming low-cpu-mem-usage parallel-loading
"""
_MEANINGLESS_VALUES = """
threads-batch tb cpu-mask C cpu-range Cr cpu-strict prio poll cpu-mask-batch Cb cpu-range-batch Crb cpu-strict-batch
prio-batch poll-batch keep defrag-thold dt rpc load-mode lm lazy-mode lzm numa override-tensor ot n-cpu-moe ncmoe
moe-cache-mib n-cpu-ffn ncffn override-kv control-vector control-vector-scaled control-vector-layer-range log-colors
verbosity lv log-verbosity samplers sampler-seq sampling-seq top-nsigma top-n-sigma xtc-probability xtc-threshold
typical typical-p dry-multiplier dry-base dry-allowed-length dry-penalty-last-n dry-sequence-breaker adaptive-target
adaptive-decay dynatemp-range dynatemp-exp mirostat mirostat-lr mirostat-ent logit-bias l grammar grammar-file
json-schema j json-schema-file jf lookup-cache-static lcs lookup-cache-dynamic lcd kv-unified-per-slot ctx-checkpoints
ctxcp swa-checkpoints checkpoint-min-step cms cache-ram cram reverse-prompt r mmproj mm mmproj-url mmu mmproj-device
mmdev image-min-tokens image-max-tokens mtmd-batch-max-tokens video-fps video-timestamp-interval video-ffmpeg-dir path
cors-methods cors-headers ui-config webui-config ui-config-file webui-config-file tools tools-runtime
mcp-servers-config mcp-servers-json threads-http cache-reuse slot-save-path media-path slot-prompt-similarity sps
log-prompts-dir reasoning-effort reasoning-budget reasoning-budget-message spec-type spec-draft-p-min draft-p-min
spec-draft-p-split draft-p-split spec-draft-threads td threads-draft spec-draft-threads-batch tbd threads-batch-draft
spec-draft-type-k ctkd cache-type-k-draft spec-draft-type-v ctvd cache-type-v-draft spec-draft-device devd device-draft
spec-draft-ngl ngld gpu-layers-draft n-gpu-layers-draft spec-draft-sampling spec-draft-n-cpu-moe ncmoed n-cpu-moe-draft
spec-draft-ncmoe spec-draft-cpu-mask Cd cpu-mask-draft spec-draft-cpu-range Crd cpu-range-draft spec-draft-cpu-strict
cpu-strict-draft spec-draft-prio prio-draft spec-draft-poll poll-draft spec-draft-cpu-mask-batch Cbd
cpu-mask-batch-draft spec-draft-cpu-strict-batch cpu-strict-batch-draft spec-draft-prio-batch prio-batch-draft
spec-draft-poll-batch poll-batch-draft spec-ngram-mod-n-min spec-ngram-mod-n-max spec-ngram-mod-n-match
spec-ngram-simple-size-n spec-ngram-simple-size-m spec-ngram-simple-min-hits spec-ngram-map-k-size-n
spec-ngram-map-k-size-m spec-ngram-map-k-min-hits spec-ngram-map-k4v-size-n spec-ngram-map-k4v-size-m
spec-ngram-map-k4v-min-hits spec-draft-override-tensor otd override-tensor-draft
lora-extra-vocab-size device-map max-batch-delay
"""
MEANINGLESS: tuple[Meaningless, ...] = (
    *(Meaningless(name=name, is_flag=True) for name in _MEANINGLESS_FLAGS.split()),
    *(Meaningless(name=name) for name in _MEANINGLESS_VALUES.split()),
)

BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}


def _spellings(words: Iterable[Word]) -> dict[str, Word]:
    table: dict[str, Word] = {}
    for word in words:
        names = (word.name, *getattr(word, "also", ()), *getattr(word, "switches", ()))
        for name in names:
            assert name not in table, f"{name} is written twice"
            table[name] = word
    return table


WORDS: Mapping[str, Word] = _spellings((*KEYS, *REFUSED, *MEANINGLESS))
"""By every spelling but variables; case counts (`C` is not `c`)."""
VARIABLES: Mapping[str, Word] = {name: word for words in (KEYS, REFUSED) for word in words for name in word.env}
"""Variables whose names do not follow from a spelling."""
_PREFIXES = ("LLAMA_ARG_", "ROUTER_", "OPTION_", "SERVING_")


@dataclass(frozen=True)
class Spelling:
    """What a word in a file, a flag or a variable means: a word of the tables, perhaps negated."""

    word: Word
    name: str
    """As it stands in the tables: the key's own name, a synonym or a switch."""
    negated: bool = False
    variable: str = ""
    """NAME of `env.NAME`."""

    @property
    def canonical(self) -> str:
        return f"env.{self.variable}" if self.variable else self.word.name

    @property
    def is_flag(self) -> bool:
        """Whether the word alone, without a value, says something."""
        return self.word.is_flag or (isinstance(self.word, Key) and self.name in self.word.switches)

    def text(self, value: str) -> str:
        """`value` as it would be written for the key's own name. Raises ValueError."""
        if self.is_flag:
            on = _FLAG.read(value) != self.negated
            if isinstance(self.word, Key) and self.name in self.word.switches:
                return self.word.switches[self.name][0 if on else 1]
            return "on" if on else "off"
        return value


def find(written: str) -> Spelling | None:
    """What `written` means: leading dashes dropped, `_` as `-`, variables of llama-server, `no-` before a flag."""
    bare = written.lstrip("-")
    if bare.startswith("env."):
        return Spelling(BY_NAME["env"], bare, variable=bare[4:]) if re.fullmatch(_VARIABLE, bare[4:]) else None
    if bare in VARIABLES:
        return _of_variable(VARIABLES[bare], bare)
    prefix = next((prefix for prefix in _PREFIXES if bare.startswith(prefix)), "")
    name = (bare.removeprefix(prefix).lower() if prefix else bare).replace("_", "-")
    if prefix and len(name) < 3:
        return None  # one or two letters are short for flags and keys only
    if name in WORDS:
        return Spelling(WORDS[name], name)
    if name.startswith("no-"):
        positive = Spelling(WORDS[name[3:]], name[3:], negated=True) if name[3:] in WORDS else None
        return positive if positive and positive.is_flag else None
    return None


def _of_variable(word: Word, variable: str) -> Spelling:
    switch = {"LLAMA_ARG_EMBEDDINGS": "embeddings", "LLAMA_ARG_RERANKING": "reranking"}.get(variable, word.name)
    return Spelling(word, switch, negated=variable == "ENABLE_CUDA_GRAPHS")


def nearest(written: str, further: Iterable[str] = ()) -> str:
    """The key (or one of `further`) that `written` was probably meant to be; empty if none is near."""
    bare = written.lstrip("-").replace("_", "-")
    known = [name for name in WORDS if len(name) > 2 and not isinstance(WORDS[name], Meaningless)]
    return next(iter(difflib.get_close_matches(bare, [*known, *further], n=1, cutoff=0.6)), "")
