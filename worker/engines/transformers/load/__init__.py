"""Weights from disk to devices: safetensors, staging, quantization, LoRA files, layer split, tensor-parallel plan."""
