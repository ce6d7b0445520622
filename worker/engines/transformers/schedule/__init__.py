"""Scheduling of sequences: admission, KV-cache blocks, prefill budget, LoRA slots, encoder batches.

PURE: numbers only, no tensors; time is an argument. Imports worker.interface and worker.protocol only.
"""
