"""The names in the preset format: all spellings of keys in files, flags and variables, and their meanings.

A name is one of four kinds: a key (`presets.KEYS`), an option that this version does not offer (`REFUSED`), an option
of llama-server or LMI without a meaning here (`MEANINGLESS`), or unknown. Pure functions.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from router.config.option_types import Flag, nearest
from router.config.presets import KEYS, PresetKey
from router.config.settings import NEGATIVE

DEMOS = ("chat", "embed", "a", "b", "c")  # names in `model = demo:NAME`
_FLAG = Flag()
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def _is_one_of(text: str, values: str) -> bool:
    """True if `text` is one of the values, which are separated by blanks; numbers are compared as such."""
    try:
        return float(text) in [float(value) for value in values.split()]
    except ValueError:
        return text.strip().lower() in values.split()


@dataclass(frozen=True)
class RefusedOption:
    """An option that this version does not offer. Values of `neutral` match its behaviour anyway and are accepted.

    `means` has values that are values of keys here, as (key, value). `is_list`: it may have several, separated by
    blanks or commas.
    """

    name: str
    instead: str = ""
    also: tuple[str, ...] = ()
    neutral: str = ""  # separated by blanks
    env: tuple[str, ...] = ()
    is_flag: bool = False
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_list: bool = False

    def values(self, text: str) -> list[str]:
        return text.replace(",", " ").split() if self.is_list else [text.strip()]

    def accepts(self, text: str) -> bool:
        return not text.strip() or _is_one_of(text, self.neutral)

    @property
    def message(self) -> str:
        return "is not offered by this version: remove it" + (f"; {self.instead}" if self.instead else "")


@dataclass(frozen=True)
class MeaninglessOption:
    """An option of another server that has no effect here. Values of `neutral` have none there, either."""

    name: str
    is_flag: bool = False
    why: str = ""
    env: tuple[str, ...] = ()
    neutral: str = ""  # separated by blanks

    def accepts(self, text: str) -> bool:
        return _is_one_of(text, self.neutral)

    @property
    def message(self) -> str:
        return f"has no meaning here; {self.why or 'remove it'}"


KnownOption = PresetKey | RefusedOption | MeaninglessOption

_OFF = "off false no disabled 0 none"
_ON = "on true yes enabled 1 auto"
# Further options of llama-server that name one of its authors' models.
_GGUF_DEFAULTS = """
embd-gemma-default fim-qwen-1.5b-default fim-qwen-3b-default fim-qwen-7b-default fim-qwen-7b-spec fim-qwen-14b-spec
fim-qwen-30b-default gpt-oss-120b-default vision-gemma-4b-default vision-gemma-12b-default
"""
_DOWNLOAD = "download the model and write model = its folder, or hf-repo = org/name"

REFUSED: tuple[RefusedOption, ...] = (
    RefusedOption("hf-file", "it names a GGUF file; use a safetensors repository", also=("hff",)),
    RefusedOption("model-url", _DOWNLOAD, also=("mu",)),
    RefusedOption("docker-repo", _DOWNLOAD, also=("dr",)),
    RefusedOption("gpt-oss-20b-default", "it names a GGUF repository; give -hf org/name of one with safetensors files",
                  is_flag=True, neutral=_OFF, also=tuple(_GGUF_DEFAULTS.split())),
    RefusedOption("list-devices", "GET /router/state shows the devices of a router", is_flag=True, neutral=_OFF),
    RefusedOption("cache-list", "`router` without a model serves the models of the hub cache", also=("cl",),
                  is_flag=True, neutral=_OFF),
    RefusedOption("cont-batching", also=("cb",), neutral=_ON, is_flag=True, means={"off": ("parallel", "1")}),
    RefusedOption("nocb", neutral=_OFF, is_flag=True, means={"on": ("parallel", "1")}),
    # Without a projector llama-server takes no images.
    RefusedOption("mmproj-auto", neutral=_ON, is_flag=True, means={"off": ("limit-images", "0")}),
    RefusedOption("no-mmproj", neutral=_OFF, is_flag=True, means={"on": ("limit-images", "0")}),
    RefusedOption("rolling-batch", "the transformers engine batches continuously",
                  neutral="auto lmi-dist vllm trtllm tensorrtllm scheduler", means={"disable": ("parallel", "1")}),
    RefusedOption("cpu-offload", "device = cpu keeps all of it in host memory",
                  also=("cpu-offload-gb-per-gpu", "cpu-offload-gb"), neutral="0"),
    RefusedOption("gpu-balance", "the emptiest device is taken first", neutral=_ON, is_flag=True),
    # A model takes what is free between one request of ctx-size and `parallel` of them.
    RefusedOption("fit", "write on or off", neutral=f"{_ON} {_OFF}"),
    RefusedOption("cache-prompt", neutral=_ON, is_flag=True, means={"off": ("prefix-caching", "off")}),
    RefusedOption("draft-model-tp-size", "the draft model is on one device", neutral="1",
                  also=("speculative-draft-tensor-parallel-size",)),
    RefusedOption("num-experts", 'config-override = {"num_experts_per_tok": N} does it'),
    RefusedOption("conv-template", "write the template into chat-template or chat-template-file"),
    RefusedOption("reasoning-budget", "write reasoning = off, or max_tokens in requests", neutral="-1",
                  env=("LLAMA_ARG_THINK_BUDGET",), means={"0": ("reasoning", "off")}),
    RefusedOption("output-formatter", "a request asks for a stream with stream: true", neutral="json"),
    RefusedOption("tgi-compat", neutral=_OFF, is_flag=True),
    RefusedOption("bedrock-compat", neutral=_OFF, is_flag=True),
    RefusedOption("async-mode", neutral=f"{_ON} {_OFF}", is_flag=True),  # see `precedence.batches_anyway`
    RefusedOption("enable-stateful-sessions", "clients send the whole conversation", neutral=_OFF, is_flag=True),
    RefusedOption("data-parallel-size", "write replicas = N", neutral="1", also=("dp",)),
    RefusedOption("kv-cache-memory-bytes", "write kv-tokens"),
    RefusedOption("normalize", neutral=_ON, is_flag=True, means={"off": ("embd-normalize", "-1")}),
    RefusedOption("mpi-mode", "the router starts its own processes", neutral=f"{_ON} {_OFF}"),
    RefusedOption("entry-point", "the engine's own handler answers; models with handlers of their own are not run",
                  also=("entryPoint", "entrypoint"), env=("DJL_ENTRY_POINT",),
                  neutral="djl_python.huggingface djl_python.lmi_vllm.vllm_async_service"
                  " djl_python.lmi_trtllm.trtllm_async_service djl_python.tensorrt_llm"),
    RefusedOption("handler", "models with handlers of their own are not run", neutral="handle"),
    RefusedOption("input-formatter", "requests have the schema of LMI's API"),
    RefusedOption("translator-factory", "the engine's own handler answers", also=("translatorFactory",),
                  means={f"ai.djl.huggingface.translator.{name}translatorfactory": ("task", task) for name, task in
                         (("textembedding", "embed"), ("crossencoder", "rerank"))}),
    RefusedOption("enable-venv", "write python = an interpreter with the packages", neutral=_OFF, is_flag=True),
    RefusedOption("tokenizer-mode", "the tokenizer is that of transformers", neutral="auto hf"),
    RefusedOption("disable-sliding-window", "ctx-size limits the context", neutral=_OFF, is_flag=True),
    RefusedOption("lora-dtype", "adapters have the model's data type", neutral="auto"),
    RefusedOption("long-lora-scaling-factors", "adapters with other positions are not offered"),
    RefusedOption("cluster-size", "a model runs on one machine", neutral="1", also=("nnodes",)),
    RefusedOption("inference-address", "use --host and --port", also=("management-address",)),
    RefusedOption("max-request-size", "use --max-body-size, in MiB"),
    RefusedOption("keystore", "a proxy in front of the router offers TLS",
                  also=("keystore-pass", "keystore-type", "certificate-file", "private-key-file", "ssl-keyfile",
                        "ssl-certfile", "ssl-ca-certs")),
    RefusedOption("cmd", "transformers is the only engine"),
    RefusedOption("extra-args", "the transformers engine takes none"),
    # EricLLM
    RefusedOption("embiggen", "each layer of the checkpoint is computed once", neutral=_OFF),
    RefusedOption("managed", "--models-preset and --models-watch configure a running router", neutral=_OFF),
    RefusedOption("encode-special", "special tokens in prompts are always encoded", neutral=_ON, is_flag=True),
    RefusedOption("decode-special", "a request may have skip_special_tokens: false", neutral=_OFF, is_flag=True),
    # FastChat
    RefusedOption("enable-exllama", "exl2 checkpoints cannot be loaded, gptq and awq checkpoints need no option",
                  neutral=_OFF, is_flag=True),
    RefusedOption("enable-xft", "device = cpu computes on the CPU", neutral=_OFF, is_flag=True),
    RefusedOption("cpu-offloading", "device = cpu keeps all of it in host memory", neutral=_OFF, is_flag=True),
    RefusedOption("gptq-ckpt", "name the folder of the quantized checkpoint as the model", also=("awq-ckpt",)),
    RefusedOption("embed-in-truncate", "a request to /v1/embeddings may have truncate_prompt_tokens: -1",
                  neutral=_OFF, is_flag=True),
    RefusedOption("ssl", "a proxy in front of the router offers TLS", neutral=_OFF, is_flag=True),
    RefusedOption("conv-system-msg", "a request may begin with a message of the role system"),
    RefusedOption("no-history", "/clear forgets a chat of `router run`", neutral=_OFF, is_flag=True),
    RefusedOption("model-info-file", "the router serves models of this machine only; give --model-path for each"),
    # LightLLM, which FastChat's lightllm_worker starts
    RefusedOption("load-way", "checkpoints must be in the Hugging Face format", neutral="hf"),
    RefusedOption("mode", "kv-cache-dtype = int8, quantization = bnb-8bit and bnb-4bit store less",
                  neutral="triton_flashdecoding triton_gqa_attention triton_gqa_flashdecoding ppl_fp16",
                  means={"triton_int8kv": ("kv-cache-dtype", "int8"), "ppl_int8kv": ("kv-cache-dtype", "int8")},
                  is_list=True),
    RefusedOption("eos-id", "the checkpoint states it; a request may have stop_token_ids"),
    RefusedOption("no-skipping-special-tokens", "a request may have skip_special_tokens: false",
                  neutral=_OFF, is_flag=True),
    RefusedOption("return-all-prompt-logprobs", "a request may have prompt_logprobs", neutral=_OFF, is_flag=True),
    RefusedOption("long-truncation-mode", "a request may have truncate_prompt_tokens", neutral="none"),
    # vLLM, which FastChat's vllm_worker and LMI start
    RefusedOption("download-dir", "HF_HUB_CACHE names the folder of downloads"),
    RefusedOption("tokenizer-revision", "write revision, which is for all files of the repository",
                  also=("code-revision",)),
    RefusedOption("skip-tokenizer-init", "a request may have token ids as its prompt", neutral=_OFF, is_flag=True),
    RefusedOption("num-gpu-blocks-override", "write kv-tokens, the tokens of all blocks"),
    RefusedOption("mm-processor-kwargs", "the checkpoint's preprocessor_config.json states them"),
    RefusedOption("enable-lora-bias", "adapters with biases cannot be loaded", neutral=_OFF, is_flag=True),
    RefusedOption("qlora-adapter-name-or-path", "write lora = name=folder"),
    RefusedOption("enable-prompt-adapter", "adapters must be LoRA; write lora = name=folder",
                  neutral=_OFF, is_flag=True),
    RefusedOption("max-prompt-adapters", "adapters must be LoRA; write lora = name=folder",
                  also=("max-prompt-adapter-token",)),
    RefusedOption("generation-config", "write temp, top-k, top-p and the like as keys", neutral="auto",
                  also=("override-generation-config",)),
    RefusedOption("override-pooler-config", "write pooling and embd-normalize"),
    RefusedOption("return-tokens-as-token-ids", "a request may have return_tokens_as_token_ids",
                  neutral=_OFF, is_flag=True),
    RefusedOption("allowed-local-media-path", "a request has its images as base64"),
    RefusedOption("logits-processor-pattern", "a request may have logit_bias"),
    RefusedOption("middleware", "a proxy in front of the router may change requests"),
    RefusedOption("root-path", "write --api-prefix"),
    RefusedOption("runner", "write task = embed, or task = rerank", neutral="auto generate"),
    RefusedOption("convert", "write task = embed, or task = rerank", neutral="auto none",
                  means={"embed": ("task", "embed")}),
    RefusedOption("model-impl", "transformers is the only engine", neutral="auto transformers"),
    RefusedOption("response-role", "an answer has the role assistant", neutral="assistant"),
    RefusedOption("scheduling-policy", "priority of a section orders models, and requests are served in their order",
                  neutral="fcfs"),
)  # fmt: skip

# All other options in the documentation of llama-server and LMI: first switches, then options with a value.
_MEANINGLESS_FLAGS = """
swa-full perf escape e kv-offload kvo nkvo repack nr no-host mlock mmap direct-io dio ndio cpu-moe cmoe check-tensors
op-offload backend-sampling bs kv-unified kvu special sp spm-infill mmproj-offload
cache-idle-slots lora-init-without-apply skip-chat-parsing reuse-port webui ui-mcp-proxy
webui-mcp-proxy agent ag reasoning-preserve log-disable log-jsonl log-prefix log-timestamps
cors-credentials verbose-prompt spec-default spec-draft-backend-sampling spec-draft-cpu-moe cmoed cpu-moe-draft
enable-chunked-prefill enable-streaming low-cpu-mem-usage parallel-loading fully-sharded-loras disable-flash-attn
disable-log-stats disable-log-requests enable-auto-tool-choice enable-expert-parallel async-scheduling
enable-eplb enable-dbo enable-log-requests disable-cascade-attn disable-uvicorn-access-log
"""
_MEANINGLESS_VALUES = """
threads-batch tb cpu-mask C cpu-range Cr cpu-strict prio poll cpu-mask-batch Cb cpu-range-batch Crb cpu-strict-batch
prio-batch poll-batch keep defrag-thold dt rpc load-mode lm lazy-mode lzm numa override-tensor ot n-cpu-moe ncmoe
moe-cache-mib n-cpu-ffn ncffn override-kv control-vector control-vector-scaled control-vector-layer-range log-colors
verbosity lv log-verbosity lookup-cache-static lcs lookup-cache-dynamic lcd kv-unified-per-slot ctx-checkpoints ctxcp
swa-checkpoints cms cache-ram cram mmproj-url mmu mmdev image-min-tokens
image-max-tokens mtmd-batch-max-tokens video-fps video-timestamp-interval video-ffmpeg-dir cors-methods
cors-headers ui-config webui-config ui-config-file webui-config-file tools tools-runtime mcp-servers-config
mcp-servers-json threads-http cache-reuse media-path slot-prompt-similarity sps log-prompts-dir spec-synth-len
spec-synth-rates spec-draft-p-min draft-p-min spec-draft-p-split draft-p-split
cpent ctx-size-draft cd spec-draft-threads td threads-draft spec-draft-threads-batch tbd threads-batch-draft ctkd
cache-type-k-draft ctvd cache-type-v-draft spec-draft-device devd device-draft spec-draft-ngl ngld
gpu-layers-draft n-gpu-layers-draft spec-draft-sampling spec-draft-n-cpu-moe ncmoed n-cpu-moe-draft spec-draft-ncmoe
spec-draft-cpu-mask Cd cpu-mask-draft spec-draft-cpu-range Crd cpu-range-draft spec-draft-cpu-strict cpu-strict-draft
spec-draft-prio prio-draft spec-draft-poll poll-draft spec-draft-cpu-mask-batch Cbd cpu-mask-batch-draft
spec-draft-cpu-strict-batch cpu-strict-batch-draft spec-draft-prio-batch prio-batch-draft spec-draft-poll-batch
poll-batch-draft spec-ngram-mod-n-min spec-ngram-mod-n-max spec-ngram-size-m spec-ngram-min-hits
spec-ngram-simple-size-m spec-ngram-simple-min-hits
spec-ngram-map-k-size-m spec-ngram-map-k-min-hits spec-ngram-map-k4v-size-m spec-ngram-map-k4v-min-hits
spec-draft-override-tensor otd override-tensor-draft lora-extra-vocab-size device-map max-batch-delay
"""
# All other options in the documentation of DJL Serving and LMI, first of a model, then of the server.
_MEANINGLESS_IN_LMI = """
log-request-metric metrics-aggregation modelName model-name-prefix max-output-size swap-space
waiting-steps record-octopus block-size guided-decoding-backend opts fail-fast wait-model-loading
number-of-netty-threads allow-multi-status cors-allowed-methods cors-allowed-headers
plugin-folder use-native-io io-ratio model-url-pattern lmcache-auto-config lmcache-config-file sessions-path
sessions-expiration attention-backend cuda-graph-sizes cudagraph-capture-sizes
max-cudagraph-capture-size prefix-caching-hash-algo max-num-partial-prefills long-prefill-token-threshold
mamba-ssm-cache-dtype structured-outputs-config reasoning-config chat-template-content-format
trust-insecure-model-files model-format features s3-cache s3-cache-bucket s3-cache-key-prefix s3-cache-autocreate
ddb-cache ddb-table-name cache-batch cache-multitenant memory-cache-capacity health-check-override paged-attention
decoding-strategy max-sparsity max-splits
"""
# Options of LMI for TensorRT-LLM, DeepSpeed, Neuron and its compiler, and of DJL for ONNX Runtime and TorchScript.
_OF_OTHER_ENGINES = """
awq-block-size awq-calib-size awq-format baichuan-model-version batch-scheduler-policy calib-batch-size calib-size
chatglm-model-version enable-kv-cache-reuse enable-trt-overlap gpt-model-version is-peft-model
kv-cache-free-gpu-mem-fraction load-by-shard logits-dtype max-num-sequences max-num-tokens max-output-len
multi-query-mode num-checkpoint-workers num-engine-workers q-format rotary-base rotary-dim rotary-scaling-factor
rotary-scaling-type smoothquant-alpha smoothquant-per-channel smoothquant-per-token tokens-per-block
trtllm-checkpoint-path use-fp8-context-fmha use-fused-mlp use-passive-workers backend optimization
cpuArenaAllocator customOpLibrary disablePerSessionThreads executionMode extraFiles interOpNumThreads intraOpNumThreads
mapLocation memoryPatternOptimization modeName optLevel ortDevice skops-trusted-types awq-ignore-layers awq-mm-version
awq-weight-bit-width awq-zero-point fp8-ignore fp8-scheme max-draft-len use-custom-all-reduce enable-cuda-graph
attention-layout collectives-layout context-length-estimate enable-mixed-precision-accumulation n-positions
neuron-optimize-level
"""
# All other options of FastChat's workers: of LightLLM, SGLang and vLLM, first switches, then options with a value.
_MEANINGLESS_FLAGS_OF_WORKERS = """
no-spaces-between-special-tokens splitfuse-mode enable-multimodal multimodal worker-use-ray engine-use-ray
ray-workers-use-nsight use-v2-block-manager disable-custom-all-reduce disable-mm-preprocessor-cache
multi-step-stream-outputs speculative-disable-mqa-scorer disable-logprobs-during-spec-decoding disable-async-output-proc
enable-sleep-mode calculate-kv-scales enable-reasoning disable-frontend-multiprocessing enable-request-id-headers
"""
_MEANINGLESS_VALUES_OF_WORKERS = """
log-stats-interval router-token-ratio router-max-new-token-len prompt-cache-strs cache-capacity cache-reserved-ratio
config-format quantization-param-path distributed-executor-backend max-parallel-loading-workers num-lookahead-slots
max-context-len-to-capture max-seq-len-to-capture tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config
num-scheduler-steps scheduler-delay-factor speculative-model-quantization speculative-max-model-len
speculative-disable-by-batch-size ngram-prompt-lookup-min spec-decoding-acceptance-method
typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha model-loader-extra-config
ignore-patterns preemption-mode otlp-traces-endpoint collect-detailed-traces override-neuron-config compilation-config
kv-transfer-config worker-cls additional-config max-log-len uvicorn-log-level all2all-backend eplb-config
kv-events-config profiler-config attention-config moe-backend mm-encoder-tp-mode mm-processor-cache-gb media-io-kwargs
max-long-partial-prefills safetensors-load-strategy api-server-count reasoning-parser-plugin tool-parser-plugin
"""
# Samplers of llama-server that the engine does not have, by name, with the values that turn each off.
_SAMPLERS: Mapping[str, str] = {
    "typical": "1", "typical-p": "1", "top-nsigma": "0 -1", "top-n-sigma": "0 -1", "xtc-probability": "0",
    "xtc-threshold": "0.1 1", "dry-multiplier": "0", "dry-base": "1.75", "dry-allowed-length": "2",
    "dry-penalty-last-n": "-1 0 64", "dry-sequence-breaker": "none", "adaptive-target": "-1", "adaptive-decay": "0.9",
    "dynatemp-range": "0", "dynatemp-exp": "1", "mirostat": "0", "mirostat-lr": "0.1", "mirostat-ent": "5",
}  # fmt: skip
_STATED = "config.json of the checkpoint states it"
_CONTROLLER = "the router answers for controller and worker: give its address to FastChat's API server"
_REASONS = (
    *(MeaninglessOption(name, is_flag=True, why="use --log-level debug") for name in ("verbose", "v", "log-verbose")),
    MeaninglessOption("debug", why="use --log-level debug"),
    *(MeaninglessOption(name, why=_STATED) for name in ("gptq-wbits", "gptq-groupsize", "awq-wbits", "awq-groupsize")),
    MeaninglessOption("gptq-act-order", is_flag=True, why=_STATED),
    # FastChat's parser takes the beginning of an option for it, and its README has --controller and --worker.
    *(
        MeaninglessOption(name, why=_CONTROLLER)
        for name in ("controller-address", "controller", "worker-address", "worker")
    ),
    MeaninglessOption("style", why="the chat in the terminal shows plain text"),
    *(
        MeaninglessOption(name, is_flag=True, why="the chat in the terminal sends each line")
        for name in ("multiline", "mouse")
    ),
    MeaninglessOption("judge-sent-end", is_flag=True, why="each token is sent when it is there"),
    MeaninglessOption(
        "record-acceptance-rate",
        is_flag=True,
        neutral="off",
        why="GET /metrics always has the drafted and the accepted tokens",
    ),
    MeaninglessOption("no-register", is_flag=True, why="the router registers at no controller"),
    MeaninglessOption("dispatch-method", why="the replica with the fewest requests gets the next one"),
    MeaninglessOption("stream-interval", why="each token is sent when it is there", neutral="1"),
    *(MeaninglessOption(name, why="it belongs to enable-xft") for name in ("xft-max-seq-len", "xft-dtype")),
    MeaninglessOption(
        "peft-share-base-weights", why="adapters share the weights of their model", env=("PEFT_SHARE_BASE_WEIGHTS",)
    ),
    MeaninglessOption("worker-api-timeout", why="--timeout limits a request", env=("FASTCHAT_WORKER_API_TIMEOUT",)),
    MeaninglessOption(
        "worker-api-embedding-batch-size",
        why="the engine batches embeddings itself",
        env=("FASTCHAT_WORKER_API_EMBEDDING_BATCH_SIZE",),
    ),
    MeaninglessOption(
        "worker-heart-beat-interval",
        why="the router watches its workers itself",
        env=("FASTCHAT_WORKER_HEART_BEAT_INTERVAL", "FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION"),
    ),
    MeaninglessOption(
        "use-modelscope", why="models come from folders and from the Hugging Face hub", env=("FASTCHAT_USE_MODELSCOPE",)
    ),
    MeaninglessOption("allow-credentials", is_flag=True, why="keys are sent in headers, not in cookies"),
    *(
        MeaninglessOption(name, why="pages of --cors-origins may use all methods and headers of the APIs")
        for name in ("allowed-methods", "allowed-headers")
    ),
)
MEANINGLESS: tuple[MeaninglessOption, ...] = (
    *_REASONS,
    *(MeaninglessOption(name, why="answers are sampled without it", neutral=off) for name, off in _SAMPLERS.items()),
    *(
        MeaninglessOption(name, why="--models-memory-margin keeps memory free", neutral="1024")
        for name in ("fit-target", "fitt")
    ),
    *(
        MeaninglessOption(name, why="ctx-size is the context of a request", neutral="4096")
        for name in ("fit-ctx", "fitc")
    ),
    *(MeaninglessOption(name, why="images need no file of their own") for name in ("mmproj", "mm")),
    MeaninglessOption("jinja", is_flag=True, why="chat templates are always Jinja", neutral="on"),
    MeaninglessOption(
        "metrics", is_flag=True, why="GET /metrics is always there", neutral="on", env=("LLAMA_ARG_ENDPOINT_METRICS",)
    ),
    MeaninglessOption("props", is_flag=True, env=("LLAMA_ARG_ENDPOINT_PROPS",)),
    MeaninglessOption("path", env=("LLAMA_ARG_STATIC_PATH",)),
    MeaninglessOption("ui", is_flag=True, why="the page of the router is always there", env=("LLAMA_ARG_UI",)),
    MeaninglessOption("checkpoint-min-step", env=("LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",)),
    MeaninglessOption("checkpoint-every-n-tokens", env=("LLAMA_ARG_CHECKPOINT_EVERY_NT",)),
    MeaninglessOption("mmproj-device", env=("MTMD_BACKEND_DEVICE",)),
    MeaninglessOption("reasoning-budget-message", env=("LLAMA_ARG_THINK_BUDGET_MESSAGE",)),
    MeaninglessOption("spec-draft-type-k", env=("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",)),
    MeaninglessOption("spec-draft-type-v", env=("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",)),
    MeaninglessOption("llama-cache", why="HF_HUB_CACHE names the folder of downloads", env=("LLAMA_CACHE",)),
    MeaninglessOption(
        "llama-log",
        why="--log-level and --log-format control the log, which is on stderr",
        env=tuple(f"LLAMA_LOG_{name}" for name in ("FILE", "COLORS", "VERBOSITY", "PREFIX", "TIMESTAMPS")),
    ),
    MeaninglessOption("warmup", is_flag=True, why="only accelerators are warmed up", neutral="on"),
    MeaninglessOption("context-shift", is_flag=True, why="a text ends with the context: raise ctx-size", neutral="off"),
    MeaninglessOption("prefill-assistant", is_flag=True, why="send continue_final_message in requests", neutral="off"),
    MeaninglessOption("slot-save-path", why="common beginnings of prompts are cached in memory"),
    *(MeaninglessOption(name, is_flag=True) for name in _MEANINGLESS_FLAGS.split()),
    *(MeaninglessOption(name) for name in _MEANINGLESS_VALUES.split()),
    *(MeaninglessOption(name) for name in _MEANINGLESS_IN_LMI.split()),
    *(MeaninglessOption(name, why="it is for another engine of LMI") for name in _OF_OTHER_ENGINES.split()),
    MeaninglessOption("djl-cache", why="HF_HUB_CACHE names the folder of downloads", env=("DJL_CACHE_DIR",)),
    MeaninglessOption("vllm-attention-backend", why="attention = eager or sdpa", env=("VLLM_ATTENTION_BACKEND",)),
    *(MeaninglessOption(name, is_flag=True) for name in _MEANINGLESS_FLAGS_OF_WORKERS.split()),
    *(MeaninglessOption(name) for name in _MEANINGLESS_VALUES_OF_WORKERS.split()),
    *(
        MeaninglessOption(name, why="the chat template shows the format of tool calls and reasoning")
        for name in ("response-template", "tool-call-parser", "reasoning-parser")
    ),
)
# Names with a different meaning in LMI's settings. llama-server spells them with a dash.
_IN_LMI: Mapping[str, MeaninglessOption] = {
    "batch-size": MeaninglessOption("batch-size", why="max_rolling_batch_size limits the requests in one step"),
}

BY_NAME: Mapping[str, PresetKey] = {key.name: key for key in KEYS}


def _spellings(words: Iterable[KnownOption]) -> dict[str, KnownOption]:
    table: dict[str, KnownOption] = {}
    for word in words:
        names = (word.name, *getattr(word, "also", ()), *getattr(word, "switches", ()))
        for name in names:
            assert name not in table, f"{name} has two meanings"
            table[name] = word
    return table


# By all spellings except variables, case-sensitive (`C` is not `c`).
WORDS: Mapping[str, KnownOption] = _spellings((*KEYS, *REFUSED, *MEANINGLESS))
# Variables whose names cannot be derived from a spelling.
VARIABLES: Mapping[str, KnownOption] = {
    name: word for words in (KEYS, REFUSED, MEANINGLESS) for word in words for name in word.env
}
_LMI_PREFIXES = ("OPTION_", "SERVING_", "option.")
PREFIXES = ("LLAMA_ARG_", "ROUTER_", *_LMI_PREFIXES)
DEVICE_PREFIXES = ("gpu.", "cpu.")  # of LMI's keys for one kind of device


@dataclass(frozen=True)
class Spelling:
    """The meaning of a name in a file, a flag or a variable: an option in the tables, possibly negated."""

    word: KnownOption
    name: str  # as in the tables: the option's name, a synonym or a switch
    negated: bool = False
    variable: str = ""  # NAME of `env.NAME`

    @property
    def canonical(self) -> str:
        """The name in a layer of settings. LMI's spellings for one kind of device keep their prefix until the device of
        the model is known."""
        prefix = next((prefix for prefix in DEVICE_PREFIXES if self.name.startswith(prefix)), "")
        return f"env.{self.variable}" if self.variable else f"{prefix}{self.word.name}"

    @property
    def is_flag(self) -> bool:
        """True if it may be given without a value."""
        return self.word.is_flag or (isinstance(self.word, PresetKey) and self.name in self.word.switches)

    def text(self, value: str) -> str:
        """The value in the form for the key's main name (a switch may stand for a value). Raises click.BadParameter."""
        if self.is_flag:
            on = _FLAG(value) != self.negated
            if isinstance(self.word, PresetKey) and self.name in self.word.switches:
                return self.word.switches[self.name][0 if on else 1]
            return "on" if on else "off"
        return value


def find(written: str, *, in_lmi: bool = False) -> Spelling | None:
    """The meaning of a name; None if it is unknown.

    Leading dashes are ignored, `_` is `-` (except in a name that LMI spells with `_` and gives another meaning),
    prefixes of variables are removed, and `no-` negates a flag. `in_lmi`: it is written in LMI's own file.
    """
    bare = written.lstrip("-")
    if bare.startswith("env."):
        return Spelling(BY_NAME["env"], bare, variable=bare[4:]) if re.fullmatch(_VARIABLE, bare[4:]) else None
    if bare in VARIABLES:
        return _of_variable(VARIABLES[bare], bare)
    positive = f"LLAMA_ARG_{bare.removeprefix(NEGATIVE)}"
    if bare.startswith(NEGATIVE) and positive in VARIABLES:
        spelling = _of_variable(VARIABLES[positive], positive)
        return replace(spelling, negated=True) if spelling.is_flag else None
    prefix = next((prefix for prefix in PREFIXES if bare.startswith(prefix)), "")
    name = bare.removeprefix(prefix).replace("_", "-")
    name = name.lower() if prefix.isupper() else name
    if prefix.isupper() and len(name) < 3:
        return None  # one-letter and two-letter names are valid as flags and keys only
    if name in _IN_LMI and (in_lmi or prefix in _LMI_PREFIXES or bare == name.replace("-", "_")):
        return Spelling(_IN_LMI[name], name)
    if name in WORDS:
        return Spelling(WORDS[name], name)
    if name.startswith("no-") and name[3:] in WORDS:
        spelling = Spelling(WORDS[name[3:]], name[3:], negated=True)
        return spelling if spelling.is_flag else None
    return None


def _of_variable(word: KnownOption, variable: str) -> Spelling:
    switch = {
        "LLAMA_ARG_EMBEDDINGS": "embeddings", "LLAMA_ARG_RERANKING": "reranking", "LLAMA_ARG_BATCH": "batch-size",
    }.get(variable, word.name)  # fmt: skip
    return Spelling(word, switch, negated=variable == "ENABLE_CUDA_GRAPHS")


def nearest_variable(name: str, further: Iterable[str]) -> str:
    """The variable of a key, or of `further`, that is most similar to an unknown one; empty if none is similar."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    known = {word.upper().replace("-", "_") for word in WORDS if not isinstance(WORDS[word], MeaninglessOption)}
    known |= {other.removeprefix(prefix) for other in further if other.startswith(prefix)}
    near = nearest(name.removeprefix(prefix), (word for word in known if len(word) > 2))
    return f"{prefix}{near}" if near else ""


def is_own(name: str) -> bool:
    """True if `name` is a key that is specific to one model."""
    return name in BY_NAME and BY_NAME[name].own


def nearest_key(written: str, further: Iterable[str] = ()) -> str:
    """The key or element of `further` that is most similar to an unknown name; empty if none is similar."""
    bare = written.lstrip("-").replace("_", "-")
    known = [name for name in WORDS if len(name) > 2 and not isinstance(WORDS[name], MeaninglessOption)]
    return nearest(bare, [*known, *further])
