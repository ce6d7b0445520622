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
        low_cpu_mem_usage device_map max_num_batched_tokens tgi_compat enable_streaming

        load_on_devices translatorFactory batch_size max_batch_delay max_idle_time log_request_metric
        metrics_aggregation minWorkers maxWorkers gpu.minWorkers gpu.maxWorkers cpu.minWorkers cpu.maxWorkers
        required_memory_mb gpu.required_memory_mb reserved_memory_mb gpu.reserved_memory_mb retry_threshold
        pythonExecutable handler predict_timeout enable_venv max_output_size

        HF_MODEL_ID HF_REVISION HF_TOKEN HF_MODEL_TRUST_REMOTE_CODE TENSOR_PARALLEL_DEGREE MAX_BATCH_SIZE
        MAX_CONCURRENT_REQUESTS SERVING_OPTS SERVING_LOAD_MODELS SERVING_BATCH_SIZE SERVING_MAX_BATCH_DELAY
        SERVING_JOB_QUEUE_SIZE SERVING_MODEL_STORE SERVING_INFERENCE_ADDRESS SERVING_MANAGEMENT_ADDRESS
        SERVING_KEYSTORE SERVING_CERTIFICATE_FILE
    """,
    # --help of model_worker, multi_model_worker, vllm_worker, controller and openai_api_server; variables
    "fastchat": """
        host port worker-address controller-address model-path model-names conv-template embed-in-truncate
        limit-worker-concurrency stream-interval no-register seed debug ssl lazy

        revision device gpus num-gpus max-gpu-memory dtype load-8bit cpu-offloading gptq-ckpt gptq-wbits gptq-groupsize
        gptq-act-order awq-ckpt awq-wbits awq-groupsize enable-exllama exllama-max-seq-len exllama-gpu-split
        exllama-cache-8bit enable-xft xft-max-seq-len xft-dtype

        trust_remote_code gpu_memory_utilization dispatch-method api-keys allow-credentials allowed-origins
        allowed-methods allowed-headers

        PEFT_SHARE_BASE_WEIGHTS FASTCHAT_USE_MODELSCOPE FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION
        FASTCHAT_WORKER_HEART_BEAT_INTERVAL FASTCHAT_WORKER_API_TIMEOUT FASTCHAT_WORKER_API_EMBEDDING_BATCH_SIZE
    """,
    # --help of ericLLM.py
    "ericllm": """
        verbose model lora host port max-model-len max-input-len gpu_split stop_character gpu_balance max_prompts
        timeout alpha_value compress_pos_emb embiggen num_experts cache_8bit num_workers managed engine encode_special
        decode_special
    """,
}
