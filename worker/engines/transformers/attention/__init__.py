"""Attention over the KV cache: paged attention for packed batches, CPU kernels, quantized KV pools, CPU linear layers.

Imports device and schedule of this engine, worker.errors and worker.protocol.
"""
