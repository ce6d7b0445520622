"""The options in the documents of each source system, by the page in docs/migration that must have a row for each."""

DOCUMENTED = {
    # the user guides of lmi-dist, vLLM and HuggingFace Accelerate; common options; options of models and of
    # the server in DJL Serving; variables
    "lmi": """
        quantize max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager gpu_memory_utilization
        speculative_draft_model draft_model_tp_size speculative_length record_acceptance_rate enable_lora max_loras
        max_lora_rank lora_extra_vocab_size max_cpu_loras enable_chunked_prefill cpu_offload_gb_per_gpu
        enable_prefix_caching disable_sliding_window tokenizer_mode

        engine job_queue_size model_id trust_remote_code revision rolling_batch max_rolling_batch_size dtype
        tensor_parallel_degree entryPoint parallel_loading model_loading_timeout output_formatter mpi_mode task
        low_cpu_mem_usage device_map max_num_batched_tokens tgi_compat enable_streaming async_mode

        load_on_devices translatorFactory batch_size max_batch_delay max_idle_time log_request_metric
        metrics_aggregation minWorkers maxWorkers gpu.minWorkers gpu.maxWorkers cpu.minWorkers cpu.maxWorkers
        required_memory_mb gpu.required_memory_mb reserved_memory_mb gpu.reserved_memory_mb retry_threshold
        pythonExecutable handler predict_timeout enable_venv max_output_size

        HF_MODEL_ID HF_REVISION HF_TOKEN HF_MODEL_TRUST_REMOTE_CODE TENSOR_PARALLEL_DEGREE MAX_BATCH_SIZE
        MAX_CONCURRENT_REQUESTS SERVING_OPTS SERVING_LOAD_MODELS SERVING_BATCH_SIZE SERVING_MAX_BATCH_DELAY
        SERVING_JOB_QUEUE_SIZE SERVING_MODEL_STORE SERVING_INFERENCE_ADDRESS SERVING_MANAGEMENT_ADDRESS
        SERVING_KEYSTORE SERVING_CERTIFICATE_FILE

        lmcache_auto_config lmcache_config_file sessions_path sessions_expiration enable_expert_parallel
        async_scheduling attention_backend cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size
        prefix_caching_hash_algo max_num_partial_prefills long_prefill_token_threshold mamba_ssm_cache_dtype
        structured_outputs_config reasoning_config chat_template_content_format trust_insecure_model_files
        model_format awq_block_size awq_calib_size awq_format baichuan_model_version batch_scheduler_policy
        calib_batch_size calib_size chatglm_model_version enable_kv_cache_reuse enable_trt_overlap gpt_model_version
        is_peft_model kv_cache_free_gpu_mem_fraction load_by_shard logits_dtype max_num_sequences max_num_tokens
        max_output_len multi_query_mode num_checkpoint_workers num_engine_workers q_format rotary_base rotary_dim
        rotary_scaling_factor rotary_scaling_type smoothquant_alpha smoothquant_per_channel smoothquant_per_token
        tokens_per_block trtllm_checkpoint_path use_fp8_context_fmha use_fused_mlp use_passive_workers backend
        optimization cpuArenaAllocator customOpLibrary disablePerSessionThreads executionMode extraFiles
        interOpNumThreads intraOpNumThreads mapLocation memoryPatternOptimization modeName optLevel ortDevice
        skops_trusted_types speculative_config limit_mm_per_prompt chat_template normalize data_parallel_size
        kv_cache_memory_bytes enable_stateful_sessions SERVING_FEATURES SERVING_S3_CACHE SERVING_S3_CACHE_BUCKET
        SERVING_S3_CACHE_KEY_PREFIX SERVING_S3_CACHE_AUTOCREATE SERVING_DDB_CACHE SERVING_DDB_TABLE_NAME
        SERVING_CACHE_BATCH SERVING_CACHE_MULTITENANT SERVING_MEMORY_CACHE_CAPACITY SERVING_HEALTH_CHECK_OVERRIDE
        PREDICT_TIMEOUT MODEL_LOADING_TIMEOUT DJL_ENTRY_POINT DJL_CACHE_DIR VLLM_ATTENTION_BACKEND OPTION_ASYNC_MODE
        OPTION_SPECULATIVE_CONFIG

        s3url adapters kv_cache_dtype runner convert default_chat_template_kwargs paged_attention awq_ignore_layers
        awq_mm_version awq_weight_bit_width awq_zero_point fp8_ignore fp8_scheme max_draft_len use_custom_all_reduce
        enable_cuda_graph attention_layout collectives_layout context_length_estimate
        enable_mixed_precision_accumulation n_positions neuron_optimize_level OPTION_MODEL HUGGING_FACE_HUB_TOKEN
        models model-store config-file decoding_strategy max_sparsity max_splits quantization cpu_offload_gb
        max_input_len kv_transfer_config OPTION_ENTRY_POINT SERVING_MIN_WORKERS SERVING_MAX_WORKERS
    """,
    # --help of model_worker, multi_model_worker, controller, openai_api_server and the workers of other engines
    # (LightLLM, SGLang, vLLM); cli in the README; variables
    "fastchat": """
        host port worker-address controller-address model-path model-names conv-template embed-in-truncate
        limit-worker-concurrency stream-interval no-register seed debug ssl lazy style multiline
        mouse judge-sent-end max-new-tokens temperature repetition_penalty conv-system-msg no-history

        revision device gpus num-gpus max-gpu-memory dtype load-8bit cpu-offloading gptq-ckpt gptq-wbits gptq-groupsize
        gptq-act-order awq-ckpt awq-wbits awq-groupsize enable-exllama exllama-max-seq-len exllama-gpu-split
        exllama-cache-8bit enable-xft xft-max-seq-len xft-dtype

        trust_remote_code gpu_memory_utilization dispatch-method api-keys allow-credentials allowed-origins
        allowed-methods allowed-headers

        max_total_token_num batch_max_tokens running_max_req_size tp max_req_input_len max_req_total_len
        splitfuse_block_size mode tokenizer-path mem-fraction-static speculative-model num-speculative-tokens
        ngram-prompt-lookup-max load_way eos_id tokenizer_mode no_skipping_special_tokens
        return_all_prompt_logprobs long_truncation_mode model-info-file download-dir tokenizer-revision
        code-revision skip-tokenizer-init num-gpu-blocks-override mm-processor-kwargs enable-lora-bias
        qlora-adapter-name-or-path enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token
        generation-config override-generation-config override-pooler-config return-tokens-as-token-ids
        allowed-local-media-path logits-processor-pattern middleware root-path model-impl response-role
        scheduling-policy speculative-draft-tensor-parallel-size ssl-keyfile ssl-certfile ssl-ca-certs
        no_spaces_between_special_tokens splitfuse_mode enable_multimodal multimodal worker-use-ray
        engine-use-ray ray-workers-use-nsight use-v2-block-manager disable-custom-all-reduce
        disable-mm-preprocessor-cache multi-step-stream-outputs speculative-disable-mqa-scorer
        disable-logprobs-during-spec-decoding disable-async-output-proc enable-sleep-mode calculate-kv-scales
        enable-reasoning disable-frontend-multiprocessing enable-request-id-headers log_stats_interval
        router_token_ratio router_max_new_token_len prompt_cache_strs cache_capacity cache_reserved_ratio
        config-format quantization-param-path distributed-executor-backend max-parallel-loading-workers
        num-lookahead-slots max-context-len-to-capture max-seq-len-to-capture tokenizer-pool-size
        tokenizer-pool-type tokenizer-pool-extra-config num-scheduler-steps scheduler-delay-factor
        speculative-model-quantization speculative-max-model-len speculative-disable-by-batch-size
        ngram-prompt-lookup-min spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold
        typical-acceptance-sampler-posterior-alpha model-loader-extra-config ignore-patterns preemption-mode
        otlp-traces-endpoint collect-detailed-traces override-neuron-config compilation-config
        kv-transfer-config worker-cls additional-config max-log-len uvicorn-log-level all2all-backend eplb-config
        kv-events-config profiler-config attention-config moe-backend mm-encoder-tp-mode mm-processor-cache-gb
        media-io-kwargs max-long-partial-prefills safetensors-load-strategy api-server-count
        reasoning-parser-plugin tool-parser-plugin enable-eplb enable-dbo enable-log-requests
        disable-cascade-attn disable-uvicorn-access-log enable-lora async-scheduling enable-expert-parallel
        pipeline-parallel-size data-parallel-size nnodes quantization disable_log_stats

        PEFT_SHARE_BASE_WEIGHTS FASTCHAT_USE_MODELSCOPE FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION
        FASTCHAT_WORKER_HEART_BEAT_INTERVAL FASTCHAT_WORKER_API_TIMEOUT FASTCHAT_WORKER_API_EMBEDDING_BATCH_SIZE
    """,
    # --help of ericLLM.py
    "ericllm": """
        verbose model lora host port max-model-len max-input-len gpu_split stop_character gpu_balance max_prompts
        timeout alpha_value compress_pos_emb embiggen num_experts cache_8bit num_workers managed engine encode_special
        decode_special
    """,
    # the options in llama-server's README that are keys of a preset
    "llama-server": """
        threads threads-batch cpu-mask cpu-range cpu-strict prio poll cpu-mask-batch cpu-range-batch
        cpu-strict-batch prio-batch poll-batch ctx-size c n-predict predict batch-size ubatch-size keep
        swa-full flash-attn perf escape rope-scaling rope-scale rope-freq-base rope-freq-scale yarn-orig-ctx
        yarn-ext-factor yarn-attn-factor yarn-beta-slow yarn-beta-fast kv-offload repack no-host cache-type-k
        cache-type-v defrag-thold rpc load-mode mmap mlock direct-io lazy-mode numa device override-tensor
        cpu-moe n-cpu-moe moe-cache-mib n-cpu-ffn n-gpu-layers split-mode tensor-split main-gpu fit fit-target
        fit-ctx check-tensors override-kv op-offload lora lora-scaled control-vector control-vector-scaled
        control-vector-layer-range model model-url docker-repo hf-repo hf-file hf-token log-disable log-file
        log-jsonl log-colors verbose offline verbosity log-prefix log-timestamps samplers sampler-seq seed
        ignore-eos temp top-k top-p min-p top-nsigma xtc-probability xtc-threshold typical typical-p
        repeat-last-n repeat-penalty presence-penalty frequency-penalty dry-multiplier dry-base
        dry-allowed-length dry-penalty-last-n dry-sequence-breaker adaptive-target adaptive-decay
        dynatemp-range dynatemp-exp mirostat mirostat-lr mirostat-ent logit-bias grammar grammar-file
        json-schema json-schema-file backend-sampling lookup-cache-static lookup-cache-dynamic
        kv-unified-per-slot ctx-checkpoints checkpoint-min-step cache-ram kv-unified cache-idle-slots
        context-shift reverse-prompt special warmup spm-infill pooling parallel cont-batching mmproj
        mmproj-url mmproj-auto mmproj-offload mmproj-device image-min-tokens image-max-tokens
        mtmd-batch-max-tokens video-fps video-timestamp-interval video-ffmpeg-dir alias tags embd-normalize
        host port reuse-port path cors-origins cors-methods cors-headers cors-credentials api-prefix ui-config
        ui-config-file ui-mcp-proxy tools tools-runtime mcp-servers-config mcp-servers-json agent ui
        embeddings reranking api-key api-key-file ssl-key-file ssl-cert-file chat-template-kwargs timeout
        sse-ping-interval threads-http cache-prompt cache-reuse metrics props slots slot-save-path media-path
        models-dir models-preset models-max models-autoload jinja reasoning-format reasoning reasoning-effort
        reasoning-budget reasoning-budget-message reasoning-preserve chat-template chat-template-file
        skip-chat-parsing prefill-assistant slot-prompt-similarity lora-init-without-apply sleep-idle-seconds
        log-prompts-dir load-on-startup stop-timeout dedup-cache-models spec-draft-hf spec-draft-threads
        spec-draft-threads-batch spec-draft-cpu-mask spec-draft-cpu-range spec-draft-cpu-strict
        spec-draft-prio spec-draft-poll spec-draft-cpu-mask-batch spec-draft-cpu-strict-batch
        spec-draft-prio-batch spec-draft-poll-batch spec-draft-override-tensor spec-draft-cpu-moe
        spec-draft-n-cpu-moe spec-draft-n-max spec-draft-n-min spec-synth-len spec-synth-rates
        spec-draft-p-split spec-draft-p-min spec-draft-backend-sampling spec-draft-sampling spec-draft-device
        spec-draft-ngl spec-draft-model spec-type spec-ngram-mod-n-min spec-ngram-mod-n-max
        spec-ngram-mod-n-match spec-ngram-simple-size-n spec-ngram-simple-size-m spec-ngram-simple-min-hits
        spec-ngram-map-k-size-n spec-ngram-map-k-size-m spec-ngram-map-k-min-hits spec-ngram-map-k4v-size-n
        spec-ngram-map-k4v-size-m spec-ngram-map-k4v-min-hits draft-max draft-min spec-default
        spec-draft-type-k spec-draft-type-v spec-ngram-size-n spec-ngram-size-m spec-ngram-min-hits
        gpt-oss-20b-default gpt-oss-120b-default embd-gemma-default vision-gemma-4b-default vision-gemma-12b-default
        fim-qwen-1.5b-default fim-qwen-3b-default fim-qwen-7b-default fim-qwen-30b-default fim-qwen-7b-spec
        fim-qwen-14b-spec list-devices LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT
        LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V LLAMA_ARG_THINK_BUDGET_MESSAGE
        MTMD_BACKEND_DEVICE LLAMA_ARG_LOG_FILE LLAMA_ARG_UI
        version ctx-size-draft verbose-prompt checkpoint-every-n-tokens LLAMA_ARG_CHECKPOINT_EVERY_NT
        LLAMA_ARG_HFD_REPO
    """,
}
