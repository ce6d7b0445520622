"""Loading of models: snapshots, safetensors files, staging to devices, quantization, LoRA adapters, layer split and
tensor-parallel plan.

Imports attention, device and schedule of this engine, and worker.interface, worker.errors and worker.protocol.
"""
