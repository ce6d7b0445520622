"""Presets: models that may be loaded, and their settings. Each setting is declared once, as a field of Preset.

Files, flags, environment variables and the reference are generated from these declarations. Pure functions.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from router.config.chat_templates import Template
from router.config.option_types import (
    DeviceNames,
    Flag,
    Integer,
    JsonObject,
    Kind,
    LastOf,
    LogitBias,
    Memory,
    MemoryByDevice,
    Names,
    Number,
    Numbers,
    OneOf,
    Samplers,
    Seconds,
    Share,
    Sizes,
    Span,
    Strings,
    Text,
    Tokens,
    declared,
    shown,
    switch_words,
)  # fmt: skip
from worker.protocol.argv import DTYPES, ENGINES, KV_CACHE_DTYPES, LOAD_FORMATS, POOLINGS, TASKS, AdapterSource
from worker.protocol.dialects.generation_fields import EFFORTS
from worker.protocol.snapshot_files import NO_GGUF

GGUF = f"{NO_GGUF}; use a safetensors repository"
_ORG_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION = "(?::([A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
REPO = re.compile(f"({_ORG_NAME}){_REVISION}")
# Also the hub's first models, whose names have no organisation: gpt2, bert-base-uncased. None of them has a dot, and a
# name with one is rather that of a missing file.
MODEL_REPO = re.compile(f"({_ORG_NAME}|[A-Za-z0-9][A-Za-z0-9_-]{{0,95}}){_REVISION}")
# The start of a repository's address. DJL's model zoo has copies of hub repositories.
_HUB_ADDRESS = re.compile(r"djl://ai\.djl\.huggingface\.\w+/|(?:https://)?(?:huggingface|hf)\.co/|hf://")
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q[0-9]|TQ[0-9]|MXFP4|BF16$|F16$|F32$).*", re.IGNORECASE)
ADAPTER_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
)  # no `@` and no slash: it is part of MODEL@NAME and of paths
HUB = "hub:"  # prefix of the repository of an adapter that is not downloaded yet
ALL_DEVICES = 1 << 20  # the value of `max` for a number of devices
DEFAULT_CHUNK = 512  # tokens; llama-server's ubatch-size
# Tokens. An H100 computes prompts of an 8B shape at 20,000, 24,900 and 30,100 tokens per second with 1,024, 2,048 and
# 4,096 (scripts/gpu_check), and the activations of 4,096 take twice the memory.
ACCELERATOR_CHUNK = 2048
DEFAULT_CONTEXTS = 4  # llama-server's number of slots
# With 32 requests of 64 tokens at once, 16 rows gave 2.2 to 3.2 times the tokens per second of 4 on two processors, and
# a third of the time to the first token; 32 rows gave no more.
DEFAULT_ROWS = 16
ALL_LAYERS = 99  # n-gpu-layers from this number on means `all`, as is usual among users of llama.cpp
DEFAULT_LORA_RANK = 16  # for adapters whose rank is not known; the default of vLLM's max_lora_rank
# Spellings of `stop` whose value is one string, with its commas.
WHOLE_STRINGS = frozenset({"r", "reverse-prompt", "stop-character"})
_FLAG = Flag()
_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,191}"
SOURCE, CONTEXT, SPECULATION, NUMERICS, PLACEMENT, ADAPTERS, PROMPT, LIFECYCLE, PROCESS = (
    "Source and identity", "Context and batch", "Speculative decoding", "Numerics", "Placement", "Adapters",
    "Prompt and sampling", "Lifecycle", "Process",
)  # fmt: skip
GROUPS = (SOURCE, CONTEXT, SPECULATION, NUMERICS, PLACEMENT, ADAPTERS, PROMPT, LIFECYCLE, PROCESS)
_LOAD_FORMAT = OneOf(
    LOAD_FORMATS,
    # vLLM's faster readers of the same files, and its word for checkpoints that bitsandbytes quantizes.
    {"fastsafetensors": "safetensors", "hf": "safetensors", "runai_streamer": "safetensors", "bitsandbytes": "auto"},
    refused=dict.fromkeys(
        ("mistral", "runai_streamer_sharded", "sagemaker_fast_model_loader", "sharded_state", "tensorizer"),
        "the weights must be safetensors in the Hugging Face format; remove it",
    )
    | {
        "pt": "pickled weights are converted to safetensors where a model has no others; remove it",
        "npcache": "the weights must be safetensors; remove it",
        "gguf": GGUF,
    },
)
_KV_TYPE = OneOf(
    KV_CACHE_DTYPES,
    {
        "float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
        "q8_0": "int8", "q4_0": "int4",
    },
    dict.fromkeys(("q4_1", "iq4_nl", "q5_0", "q5_1"), "int4 and int8 are")
    | dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "int8 is"),
)  # fmt: skip
_DTYPE = OneOf(
    DTYPES,
    {
        "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16",
        "half": "float16", "bf16": "bfloat16",
    },
    {"int8": "write quantization = bnb-8bit"},
)  # fmt: skip
_QUANTIZATION = OneOf(
    ("auto", "none", "bnb-8bit", "bnb-4bit", "gptq", "awq", "fp8"),
    {
        "bitsandbytes": "bnb-4bit",
        "bitsandbytes4": "bnb-4bit",
        "bitsandbytes8": "bnb-8bit",
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",  # vLLM's kernels for them
    },
    dict.fromkeys(
        ("squeezellm", "smoothquant", "modelopt"),
        "transformers cannot load it; take a checkpoint quantized with gptq or awq",
    ),
)
_TASKS = {
    "text-generation": "generate", "text2text-generation": "generate", "image-text-to-text": "generate",
    "text-embedding": "embed", "feature-extraction": "embed", "sentence-similarity": "embed", "embedding": "embed",
    "text-ranking": "rerank", "score": "rerank",
}  # fmt: skip
_ATTENTION = OneOf(
    ("auto", "eager", "sdpa"),
    {**switch_words("auto", "eager"), "-1": "auto"},
    dict.fromkeys(
        ("flash", "flash_attention_2", "flash_attention_3"),
        "leave attention at auto, which uses PyTorch's FlashAttention kernel where the device has one",
    ),
)
_ENABLE_LORA = OneOf(("auto", "on", "off"), switch_words("on", "off"))
_ENGINE = OneOf(
    tuple(ENGINES),
    # Rust and OnnxRuntime are LMI's engines for embeddings.
    dict.fromkeys(("python", "mpi", "rust", "onnxruntime"), "transformers"),
    dict.fromkeys(
        (
            "vllm",
            "llama-server",
            "command",
            "exllamav2",
            "deepspeed",
            "fastertransformer",
            "pytorch",
            "tensorrt",
            "tensorrt-llm",
            "tnx",
        ),
        "transformers is the only engine; remove it",
    ),
)


class Scope(Enum):
    """The part of the system that uses a setting. Presets with equal settings of scope WORKER share a worker."""

    WORKER = "worker"
    REQUEST = "request"  # the worker applies it to requests by this preset's name
    NAME = "name"  # the router applies it to this preset's name


@dataclass(frozen=True, kw_only=True)
class PresetKey:
    """One setting of a model: its name in files, flags and variables, and its field of Preset."""

    name: str
    kind: Kind
    field: str = ""  # of Preset; empty: `resolve` computes other fields from it
    item: str = ""  # the key in the field, if the field is a mapping
    group: str
    help: str
    unset: str = ""  # description of the default, if the field's default only marks that nothing was set
    also: tuple[str, ...] = ()  # other spellings, including one letter
    env: tuple[str, ...] = ()  # variables of llama-server and LMI whose names cannot be derived from a spelling
    switches: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # flag: (value if on, if off)
    own: bool = False  # specific to one model: not allowed in [*], as a flag or as a variable
    live: bool = False  # a change does not restart a running worker
    scope: Scope = Scope.WORKER
    path: bool = False  # a file or folder; relative to the folder of the preset file, or to the working directory

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)


def key(default: Any, kind: Kind, group: str, help: str, **facts: Any) -> Any:
    """Declare a field of Preset as a key. `facts`: further fields of `PresetKey`; the default name is the field's."""
    return declared(default, kind=kind, group=group, help=help, **facts)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model that may be loaded, and the declaration of its settings.

    The fields are flat, because each is one key of the INI format and most of the router reads a few of them. Sizes are
    in bytes, times in seconds (-1.0: off).
    """

    id: str
    source: Literal["preset", "models_dir", "cache"] = "preset"

    # Source and identity. Exactly one of path, repo and demo is set.
    path: str = ""  # absolute path of a snapshot folder
    repo: str = ""  # `org/name` on the hub
    demo: str = ""  # name of a built-in demo model (`model = demo:NAME`)

    # fmt: off
    revision: str = key("main",
            Text("branch, tag or commit", r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}(?<!/)", "is no branch, tag or commit"),
            SOURCE, "revision of the repository", env=("HF_REVISION",), own=True)
    tokenizer: str = key("", Text("folder"), SOURCE, "folder of a different tokenizer", unset="the model's", path=True,
            also=("tokenizer-path",))
    load_format: str = key("auto", _LOAD_FORMAT, SOURCE, "dummy: random weights")
    trust_remote_code: bool = key(False, _FLAG, SOURCE, "run Python code that comes with the model",
            env=("HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"))
    dedup_cache_models: bool = key(False, _FLAG, SOURCE,
            "do not list the cached repository of this section as a model of its own; its name selects this model",
            live=True, scope=Scope.NAME)
    aliases: tuple[str, ...] = key((), Names(_NAME, "is no model name"), SOURCE, "other names of the model",
            name="alias", unset="none", also=("a", "model-names", "served-model-name"), own=True, live=True,
            scope=Scope.NAME)
    tags: tuple[str, ...] = key((), Names(), SOURCE, "shown in lists; not used for routing", unset="none", live=True,
            scope=Scope.NAME)
    task: Literal["auto", "generate", "embed", "rerank"] = key("auto",
            OneOf(TASKS, _TASKS),
            SOURCE, "auto: by the architecture", env=("LLAMA_ARG_EMBEDDINGS", "LLAMA_ARG_RERANKING", "HF_TASK"),
            switches={"embedding": ("embed", "auto"), "embeddings": ("embed", "auto"),
                      "reranking": ("rerank", "auto"), "rerank": ("rerank", "auto")})
    pooling: str = key("", OneOf((*POOLINGS, "")), SOURCE,
            "method that combines token vectors into one embedding; rank: a cross-encoder", unset="the model's")
    embd_normalize: int = key(2, Integer(-1, 1 << 20, unit="-1 none, 0 max, 1 taxicab, 2 euclidean, p"), SOURCE,
            "norm of an embedding")

    # Context and batch
    ctx_size: int = key(-1, Tokens(0, words={"auto": -1}, unit="tokens"), CONTEXT,
            "tokens of prompt and answer of one request; 0: the model's maximum. In [*] at most the maximum of each"
            " model",
            unset="the model's maximum up to 8192",
            also=("c", "ctx", "max-model-len", "exllama-max-seq-len", "max-req-total-len"))
    parallel: int = key(0, Integer(1, 4096, {"-1": 0, "auto": 0}), CONTEXT,
            "sequences in one step; one of them has room in the KV cache for certain, all of them where memory is free",
            unset=f"{DEFAULT_ROWS} that share the cache of {DEFAULT_CONTEXTS}; without a cache in blocks"
            f" {DEFAULT_CONTEXTS}",
            also=("np", "max-batch-size", "max-rolling-batch-size", "max-prompts", "max-num-seqs",
                  "running-max-req-size"),
            env=("LLAMA_ARG_N_PARALLEL", "MAX_BATCH_SIZE"))
    kv_tokens: int = key(0, Integer(0, 1 << 40, {"auto": 0}, unit="tokens"), CONTEXT,
            "capacity of the KV cache for all requests; if it is exhausted, the newest requests wait",
            unset="what is free, from ctx-size to ctx-size x parallel (4 if unset)", also=("max-total-token-num",))
    kv_cache_dtype: str = key("auto", _KV_TYPE, CONTEXT,
            "data type of the KV cache, the same for keys and values; auto: the model's; int8 takes half of 16 bits,"
            " int4 a third",
            also=("ctk", "cache-type-k", "ctv", "cache-type-v"),
            switches={"cache-8bit": ("int8", "auto"), "exllama-cache-8bit": ("int8", "auto")})
    prefix_caching: bool = key(True, _FLAG, CONTEXT,
            "compute a common beginning of prompts once, if the KV cache has blocks",
            also=("enable-prefix-caching",))
    prefill_chunk: int = key(0, Integer(1, 1 << 20, unit="tokens"), CONTEXT, "most tokens of one prompt in one step",
            unset="max-prefill-tokens, or 512; with a KV cache in blocks on accelerators 2048",
            also=("ub", "ubatch-size", "splitfuse-block-size"),
            env=("LLAMA_ARG_UBATCH",))
    max_prefill_tokens: int = key(0, Integer(1, 1 << 20, unit="tokens"), CONTEXT,
            "most tokens of all prompts in one step; the smaller of this and prefill-chunk applies. llama-server's"
            " batch-size leaves prefill-chunk at 512",
            unset="prefill-chunk",
            also=("b", "batch-size", "max-rolling-batch-prefill-tokens", "max-num-batched-tokens",
                  "batch-max-tokens"),
            env=("LLAMA_ARG_BATCH", "MAX_BATCH_PREFILL_TOKENS"))
    limit_images: int = key(8, Integer(0, 1024), CONTEXT, "most images in one prompt of a vision model; 0: none",
            also=("limit-mm-per-prompt",))
    max_input_tokens: int = key(0, Integer(0, unit="tokens"), CONTEXT, "longest prompt", unset="ctx-size - 1",
            also=("max-input-len", "max-req-input-len"))
    n_predict: int = key(-1, Integer(1, words={"-1": -1, "-2": -1}, unit="tokens"), CONTEXT,
            "most new tokens of a request without a maximum", unset="to the end of the context",
            also=("n", "predict", "max-new-tokens"), scope=Scope.REQUEST)
    queue_size: int = key(1000, Integer(1), CONTEXT,
            "most waiting requests of this model; the flag of this name limits all models",
            also=("job-queue-size",), env=("MAX_CONCURRENT_REQUESTS",), live=True)
    max_concurrent: int = key(0, Integer(1, words={"0": 0, "-1": 0}), CONTEXT,
            "most requests of this model at once, including waiting ones; others get status 429", unset="unlimited",
            live=True)
    request_timeout: float | None = key(None, Seconds(off=0.0), CONTEXT, "time limit of one request; 0: none",
            unset="--timeout", also=("predict-timeout",), env=("PREDICT_TIMEOUT",), live=True, scope=Scope.NAME)

    # Speculative decoding
    spec_type: Literal["none", "ngram-simple"] = key("none",
            LastOf(("none", "ngram-simple"),
                   # A draft model drafts wherever it is named. The reader warns about draft-mtp.
                   {"draft-simple": "none", "draft-mtp": "none"}
                   | dict.fromkeys(("ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod"), "ngram-simple"),
                   dict.fromkeys(("draft-eagle3", "draft-dflash", "draft-dspark"),
                                 "write model-draft, or use ngram-simple")),
            SPECULATION, "ngram-simple: draft the tokens that followed the newest ones before in the text",
            switches={"spec-default": ("ngram-simple", "draft-simple")})
    model_draft: str = key("", Text("folder or org/name[:revision]"), SPECULATION,
            "a small model of the same vocabulary that drafts, for models on one device without states and encoder",
            unset="none", own=True, path=True,
            also=("md", "spec-draft-model", "speculative-draft-model", "speculative-model", "hf-repo-draft", "hfd",
                  "hfrd", "spec-draft-hf", "speculative-config"),
            env=("LLAMA_ARG_SPEC_DRAFT_HF_REPO", "LLAMA_ARG_HFD_REPO"))
    draft_max: int = key(16, Integer(0, 1 << 10, unit="tokens"), SPECULATION,
            "most tokens that are drafted for a request in one step, where that pays; 0: none",
            also=("spec-draft-n-max", "speculative-length", "num-speculative-tokens", "draft", "draft-n"))
    draft_min: int = key(0, Integer(0, 1 << 10, unit="tokens"), SPECULATION, "shortest draft that is worth a step",
            also=("spec-draft-n-min", "draft-n-min"))
    ngram_size: int = key(3, Integer(1, 64, unit="tokens"), SPECULATION,
            "newest tokens that ngram-simple looks up in the text", name="spec-ngram-size-n",
            also=("spec-ngram-simple-size-n", "spec-ngram-map-k-size-n", "spec-ngram-map-k4v-size-n",
                  "spec-ngram-mod-n-match", "ngram-prompt-lookup-max"))

    # Numerics
    dtype: str = key("auto", _DTYPE,
            NUMERICS, "auto: the checkpoint's; float32 in place of float16 on the CPU", also=("torch-dtype",))
    quantization: str = key("auto", _QUANTIZATION,
            NUMERICS, "auto: the checkpoint's; bnb-8bit, bnb-4bit: quantize linear layers during the load",
            also=("quantize", "q"), env=("HF_MODEL_QUANTIZE",),
            switches={"load-in-8bit": ("bnb-8bit", "auto"), "load-in-4bit": ("bnb-4bit", "auto"),
                      "load-8bit": ("bnb-8bit", "auto")})
    attention: str = key("auto", _ATTENTION,
            NUMERICS, "implementation of attention; auto: the fastest available one", also=("fa", "flash-attn"))
    threads: int = key(0, Integer(1, 4096, {"-1": 0, "0": 0, "auto": 0}), NUMERICS, "threads of one worker",
            unset="1 on an accelerator, half the cores on the CPU", also=("t",))
    seed: int = key(-1, Integer(-1, (1 << 63) - 1), NUMERICS, "seed of requests without one; -1: a random one",
            also=("s",), scope=Scope.REQUEST)
    enforce_eager: bool = key(False, _FLAG, NUMERICS,
            "no CUDA graphs, and on the CPU no reordered weights: slower, but in less memory",
            env=("ENABLE_CUDA_GRAPHS",))
    max_logprobs: int = key(20, Integer(0, 1 << 16), NUMERICS, "most log probabilities per token of a request")

    # Placement
    # `cpu`, `cuda:N` or a UUID. If empty, the planner chooses among the accelerators, or the CPU if there are none.
    device: tuple[str, ...] = key((), DeviceNames(), PLACEMENT, "devices that the model may use", unset="auto",
            also=("dev", "mg", "main-gpu", "load-on-devices", "gpus"))
    split_mode: Literal["auto", "none", "layer", "tensor"] = key("auto",
            OneOf(("auto", "none", "layer", "tensor"), {"row": "tensor"}), PLACEMENT,
            "auto: one accelerator if the model fits, else its layers on as few as possible; layer: on two at least;"
            " tensor: each matrix divided among as few as possible, two at least",
            also=("sm",))
    pipeline_parallel: int = key(1, Integer(1, 64, {"max": ALL_DEVICES}), PLACEMENT,
            "number of accelerators that the layers are split over; max: all",
            also=("pp", "pipeline-parallel-degree", "pipeline-parallel-size"), env=("PIPELINE_PARALLEL_DEGREE",))
    tensor_parallel: int = key(1, Integer(1, 64, {"max": ALL_DEVICES}), PLACEMENT,
            "number of accelerators that each matrix is divided among, or of processes on the CPU; max: all"
            " accelerators; a model that cannot be divided is split by layers",
            also=("tp", "tensor-parallel-degree", "tensor-parallel-size", "num-gpus"), env=("TENSOR_PARALLEL_DEGREE",))
    gpu_split: tuple[int, ...] = key((), Sizes(), PLACEMENT,
            "most memory of each accelerator, or of the first, the second, ...; 0: do not use it",
            unset="all", also=("max-gpu-memory", "exllama-gpu-split"))
    gpu_memory_utilization: float = key(1.0, Share(), PLACEMENT,
            "share of a device that the model may take at most; it limits the KV cache", unset="what is free",
            also=("mem-fraction-static",))
    tensor_split: tuple[float, ...] = key((), Numbers(), PLACEMENT,
            "proportions of the layers on each accelerator; the number of values is that of accelerators",
            unset="by free memory", also=("ts",))
    replicas: tuple[int, int] = key((1, 1), Span(), PLACEMENT,
            "number of workers, or least and most; more start if each has more requests than parallel, where memory is"
            " free",
            also=("num-workers",), live=True)
    replica_idle: float = key(60.0, Seconds(), PLACEMENT,
            "idle time after which a worker beyond the least number stops", name="replica-idle-seconds",
            also=("max-idle-time",), live=True)
    required_memory: Mapping[str, int] = key({}, MemoryByDevice(1), PLACEMENT, "memory to use in place of the estimate",
            unset="estimate", also=("required-memory-mb", "gpu.required-memory-mb"))  # by device name; "": any device
    reserved_memory: int = key(0, Memory(), PLACEMENT, "memory added to the estimate on each device",
            also=("reserved-memory-mb", "gpu.reserved-memory-mb"))

    # LoRA adapters
    lora: tuple[str, ...] = key((), Names(hint="name=folder or org/name, ..."), ADAPTERS,
            "LoRA adapters for requests, which name them as MODEL@NAME or in their bodies", unset="none", own=True,
            also=("lora-dir", "lora-modules"), live=True)
    lora_scaled: tuple[str, ...] = key((), Names(hint="folder:scale, ..."), ADAPTERS, "the same, each with a scale",
            unset="none", own=True, live=True)
    default_lora: str = key("", Text("name"), ADAPTERS, "adapter of requests without one", unset="none", own=True,
            live=True, scope=Scope.REQUEST)
    adapters_dir: str = key("", Text("folder"), ADAPTERS, "folder of adapters: each folder in it is one, by its name",
            unset="adapters/ in the model's folder", own=True, live=True, path=True, also=("adapters",))
    enable_lora: str = key("auto", _ENABLE_LORA,
            ADAPTERS, "reserve memory for adapters; auto: if the model has any when the router reads its files")
    max_loras: int = key(4, Integer(1, 1024), ADAPTERS, "adapters in use at once; memory is reserved for all of them")
    max_lora_rank: int = key(DEFAULT_LORA_RANK, Integer(1, 4096), ADAPTERS, "largest rank of an adapter",
            unset="16, or the largest rank of the model's adapters")
    max_cpu_loras: int = key(0, Integer(0, 1 << 20), ADAPTERS, "unused adapters whose files stay open", unset="all")

    # Prompt and sampling
    config_override: str = key("", JsonObject(), PROMPT, "merged into config.json", unset="none",
            also=("hf-overrides",))
    chat_template: str = key("", Template(), PROMPT, "template that converts messages to a prompt",
            unset="the tokenizer's", scope=Scope.REQUEST)
    chat_template_file: str = key("", Text("file"), PROMPT, "the same, read from a file", unset="none", path=True,
            scope=Scope.REQUEST)
    chat_template_kwargs: str = key("", JsonObject(), PROMPT, "arguments of the template", unset="none",
            also=("default-chat-template-kwargs",), env=("LLAMA_CHAT_TEMPLATE_KWARGS",), scope=Scope.REQUEST)

    # Lifecycle
    load_on_startup: bool = key(False, _FLAG, LIFECYCLE, "load when the router starts", live=True, scope=Scope.NAME,
            switches={"lazy": ("off", "on")})
    autoload: bool | None = key(None, _FLAG, LIFECYCLE, "load when a request needs it", unset="--models-autoload",
            live=True, scope=Scope.NAME)
    pin: bool = key(False, _FLAG, LIFECYCLE, "never evict", live=True)
    priority: int = key(0, Integer(-1000, 1000), LIFECYCLE, "higher: first in the queue, last to be evicted", live=True)
    ttl: float = key(-1.0, Seconds(off=-1.0), LIFECYCLE,
            "idle time after which the worker stops, or its sleeping weights are released", unset="off",
            also=("keep-alive",), live=True)
    prefetch: tuple[str, ...] = key((), Names(), LIFECYCLE,
            "models usually needed together with this one, by id or alias: their files are read early, and they are"
            " loaded where memory is free",
            unset="none", own=True, live=True)
    sleep_idle: float = key(-1.0, Seconds(off=-1.0), LIFECYCLE,
            "idle time after which the worker stops; its weights stay in main memory, within --sleep-memory",
            name="sleep-idle-seconds", unset="off", live=True)
    idle_grace: float = key(-1.0, Seconds(off=0.0, words={"auto": -1.0}), LIFECYCLE,
            "idle grace: time for which an idle worker within min-residency is kept for its next request",
            unset="half the expected load time of the waiting model, 0.2 to 2; 0 if a request rarely comes so soon",
            live=True)
    min_residency: float = key(-1.0, Seconds(off=0.0, words={"auto": -1.0}), LIFECYCLE,
            "time for which a loaded model in use is not evicted", unset="10, or --swap-patience if less", live=True)
    start_timeout: float = key(240.0, Seconds(low=0.1), LIFECYCLE, "time limit of a load without progress",
            also=("model-loading-timeout",), env=("MODEL_LOADING_TIMEOUT",), live=True)
    stop_timeout: float = key(10.0, Seconds(), LIFECYCLE, "time from SIGTERM to SIGKILL", live=True)
    stall_timeout: float = key(120.0, Seconds(low=0.1), LIFECYCLE,
            "time without a pulse, or without a step while requests run, after which a worker is stalled",
            also=("chunked-read-timeout",), live=True)
    max_restarts: int = key(3, Integer(0, 1000), LIFECYCLE, "crashes in 10 minutes before the back-off grows",
            also=("retry-threshold",), live=True)

    # Process
    engine: str = key("transformers", _ENGINE, PROCESS, "engine that computes the tokens")
    python: str = key("", Text("interpreter"), PROCESS, "Python of the worker", unset="the router's",
            also=("pythonExecutable", "python-executable"), path=True)
    # fmt: on

    # Computed from the keys
    # All adapters, from the keys above and from API calls. The path of an adapter on the hub is `hub:org/name:revision`
    # until it is downloaded.
    adapters: tuple[AdapterSource, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by key: temp, stop, grammar, ...
    rope: Mapping[str, float | str] = field(default_factory=dict)  # by key, without values that change nothing
    env: Mapping[str, str] = field(default_factory=dict)
    # The layers on accelerators (n-gpu-layers); no engine can keep the others elsewhere.
    gpu_layers: int = ALL_LAYERS
    # ctx-size is that of all models ([*], a flag or a variable), so each gets its own maximum at most.
    caps_ctx: bool = field(default=False, compare=False)
    expects_accelerator: bool = field(default=False, compare=False)  # device = cuda, which is auto here
    strict_fields: bool = False
    origins: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # by key: `models.ini:14`, `--ctx-size`, ...

    @property
    def speculates(self) -> bool:
        """True if tokens are drafted (speculative decoding)."""
        return self.draft_max > 0 and (self.spec_type != "none" or bool(self.model_draft))

    @property
    def drafts_by_model(self) -> bool:
        return self.draft_max > 0 and bool(self.model_draft)

    @property
    def contexts(self) -> int:
        """The number of full contexts for which the KV cache has room at most, unless `kv_tokens` fixes it."""
        return self.parallel or DEFAULT_CONTEXTS

    @property
    def chunk(self) -> int:
        """The most tokens of prompts in one step; 0: not stated (`checkpoint_facts.prefill_chunk`)."""
        stated = [tokens for tokens in (self.prefill_chunk, self.max_prefill_tokens) if tokens]
        return min(stated, default=0)

    @cached_property  # read for each request
    def adapter_slots(self) -> int:
        """The number of adapters with reserved memory; 0: the worker cannot use adapters."""
        is_auto = self.enable_lora == "auto"
        has_some = bool(self.lora or self.lora_scaled or self.adapters_dir)
        return self.max_loras if self.enable_lora == "on" or (is_auto and has_some) else 0


# Keys without a field of their own: the source, items of `sampling`, `rope` and `env`, and another spelling of
# `device`.
_OTHER_KEYS: tuple[PresetKey, ...] = (
    PresetKey(name="model", kind=Text("folder, org/name or demo:NAME"), group=SOURCE,
        also=("m", "model-path", "model-id", "s3url"), env=("HF_MODEL_ID",), own=True,
        help="folder with config.json and safetensors files, repository of the hub, or built-in model"),
    PresetKey(name="hf-repo", kind=Text("org/name[:revision]"), group=SOURCE, also=("hf", "hfr"), own=True,
        help="repository of the hub"),
    PresetKey(name="import", kind=Text("folder, or serving.properties"), group=SOURCE, own=True, path=True,
        unset="none", help="settings of LMI's serving.properties, and the model that it names or stands beside"),
    PresetKey(name="n-gpu-layers",
        kind=Integer(0, 1 << 20, {"auto": 1 << 20, "all": 1 << 20, "-1": 1 << 20, "-2": 1 << 20}),
        group=PLACEMENT, also=("ngl", "gpu-layers"),
        help="0: device = cpu; all, auto, or not less than the model has: all layers"),
    *(
        PresetKey(name=f"{word}-workers", kind=Integer(low, 1000), group=PLACEMENT,
            also=(f"{word}Workers", f"gpu.{word}Workers", f"cpu.{word}Workers"), live=True,
            help=f"{place} number of replicas", unset=unset)
        for word, low, place, unset in (("min", 0, "least", "replicas"), ("max", 1, "largest", "min-workers"))
    ),
    *(
        PresetKey(name=name, kind=kind, field="sampling", item=name, group=PROMPT, scope=Scope.REQUEST, also=also,
            env=env, help=help, unset="the model's, then the API's")
        for name, kind, also, env, help in (
            ("temp", Number(0.0, 100.0), ("temperature",), (), "0: greedy"),
            ("top-k", Integer(0, words={"-1": 0}), (), (), "number of most likely tokens to keep; 0: all"),
            ("top-p", Number(0.0, 1.0), (), (), "total probability of the most likely tokens to keep"),
            ("min-p", Number(0.0, 1.0), (), (), "least probability to keep, relative to the most likely token"),
            ("repeat-penalty", Number(0.01, 100.0), ("repetition-penalty",), (), "1: none"),
            ("repeat-last-n", Integer(-1), (), (), "number of last tokens that penalties apply to; -1: all"),
            ("presence-penalty", Number(-100.0, 100.0), (), (), "penalty of a token that has occurred"),
            ("frequency-penalty", Number(-100.0, 100.0), (), (), "penalty of a token per occurrence"),
            ("stop", Strings(), ("stop-sequence", "stop-character", "r", "reverse-prompt"), (),
             "strings that end an answer"),
            ("samplers", Samplers(), ("sampler-seq", "sampling-seq"), (), "samplers to apply, in their order"),
            ("logit-bias", LogitBias(), ("l",), (), "biases of tokens by id; -inf bans one"),
            ("ignore-eos", _FLAG, (), (), "go on behind the end of an answer"),
            ("grammar", Text("GBNF"), (), (), "grammar of answers, where a request has neither one nor tools"),
            ("json-schema", JsonObject(), ("j",), (), "JSON schema in place of grammar"),
            ("reasoning-format", OneOf(("auto", "none"), {"deepseek": "auto"},
                {"deepseek-legacy": "reasoning is either in the content (none) or in reasoning_content (auto)"}),
             (), ("LLAMA_ARG_THINK",), "none: reasoning stays in the content"),
            ("reasoning-budget", Integer(-1), (), ("LLAMA_ARG_THINK_BUDGET",),
             "tokens after which reasoning is ended; 0: no reasoning, -1: no limit"),
        )
    ),
    *(
        PresetKey(name=f"{name}-file", kind=Text("file"), group=PROMPT, also=also, path=True, scope=Scope.REQUEST,
            help=f"file with the text of {name}", unset="none")
        for name, also in (("grammar", ()), ("json-schema", ("jf",)))
    ),
    PresetKey(name="reasoning", kind=OneOf(("auto", "on", "off"), switch_words("on", "off")), group=PROMPT,
        also=("rea",), scope=Scope.REQUEST, unset="auto",
        help="off: enable_thinking is false in the chat template; otherwise true where the template has such a switch"),
    PresetKey(name="reasoning-effort", kind=OneOf(("default", *EFFORTS)), group=PROMPT, scope=Scope.REQUEST,
        help="reasoning_effort of the chat template", unset="the template's"),
    *(
        PresetKey(name=name, kind=kind, field="rope", item=name, group=CONTEXT, also=also, env=env, help=help,
            unset="the model's")
        for name, kind, also, env, help in (
            ("rope-scaling", OneOf(("none", "linear", "yarn", "")), (), ("LLAMA_ARG_ROPE_SCALING_TYPE",),
             "method of rope-scale: linear by default; none: remove that of the model"),
            ("rope-scale", Number(1.0, 1e6), ("compress-pos-emb",), (), "factor by which the context grows; 1: none"),
            ("rope-freq-scale", Number(0.0, 1.0), (), (), "1 / rope-scale; 0 and 1: none"),
            ("rope-freq-base", Number(0.0, 1e15), ("rope-theta",), (), "base of the rotation; 0: the model's"),
            ("alpha-value", Number(1.0, 1e6), (), (),
             "NTK-aware scaling: base x alpha ^ (d / (d - 2)) for d rotated dimensions of a head; 1: none"),
            ("yarn-orig-ctx", Integer(0, unit="tokens"), (), (), "context that the model was trained with"),
            ("yarn-ext-factor", Number(-1.0, 1.0), (), (), "1: rope-scaling = yarn; 0: linear; -1: by rope-scaling"),
            ("yarn-attn-factor", Number(-1.0, 100.0), (), (), "factor on YaRN's scale of attention; -1 and 1: none"),
            ("yarn-beta-slow", Number(-1.0, 1e4), (), (), "rotations below which YaRN interpolates; -1: 1"),
            ("yarn-beta-fast", Number(-1.0, 1e4), (), (), "rotations above which YaRN extrapolates; -1: 32"),
        )
    ),
    PresetKey(name="env", kind=Text("K=V,K=V"), group=PROCESS, unset="none",
        help="environment variables of the worker in addition to the allow-list; or one env.NAME = value each"),
)  # fmt: skip
_FIELD_KEYS = (
    PresetKey(**{"field": declared.name, "name": declared.name.replace("_", "-"), **declared.metadata})
    for declared in dataclasses.fields(Preset)
    if declared.metadata
)
# All settings of a model, in the order of the reference.
KEYS: tuple[PresetKey, ...] = tuple(sorted((*_OTHER_KEYS, *_FIELD_KEYS), key=lambda key: GROUPS.index(key.group)))
_LIVE_FIELDS = {key.field for key in KEYS if key.live} | {
    "source",
    "chat_template_file",
    "origins",
    "adapters",
    "caps_ctx",
    "expects_accelerator",
}
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Preset) if field.name not in _LIVE_FIELDS)
DEFAULTS = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(Preset)
}


def same_load(a: Preset, b: Preset) -> bool:
    """True if both presets would start the same worker."""
    return a.adapter_slots == b.adapter_slots and all(getattr(a, name) == getattr(b, name) for name in _LOAD_FIELDS)


def hub_name(text: str) -> str:
    """`text` without the start of an address of the hub: `hf.co/org/name` is `org/name`."""
    address = _HUB_ADDRESS.match(text)
    return text[address.end() :] if address else text


def repository(text: str, form: re.Pattern[str] = MODEL_REPO) -> tuple[str, str]:
    """Parse `org/name[:revision]` into (`org/name`, revision), or `gpt2`. Raises ValueError with the remedy."""
    match = form.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        raise ValueError(f"{shown(text)} is not org/name or org/name:revision")
    if match[1].lower().endswith("-gguf") or (match[2] and _QUANTISATION.fullmatch(match[2])):
        raise ValueError(GGUF)
    return match[1], match[2] or "main"
