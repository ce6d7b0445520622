"""Scheduling of sequences: KV-cache blocks, prefill budget, LoRA slots.

PURE but for clocks that are passed in.
"""
