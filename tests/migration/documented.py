"""The options in the documents of each source system, by the page in docs/migration that must have a row for each."""

DOCUMENTED = {
    # the table of the lmi-dist user guide
    "lmi": """
        quantize max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager gpu_memory_utilization
        speculative_draft_model speculative_length record_acceptance_rate enable_lora max_loras max_lora_rank
        lora_extra_vocab_size max_cpu_loras enable_chunked_prefill cpu_offload_gb_per_gpu enable_prefix_caching
    """,
}
