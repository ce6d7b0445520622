"""Attention over the KV cache: paged, on CPUs, with a quantized cache."""
