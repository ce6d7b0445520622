"""Devices and memory of this process: allocator cap, measured overhead, CUDA errors, processes of tensor-parallel
ranks.

Imports worker.errors and worker.protocol only.
"""
