"""Devices: memory cap, driver, CUDA errors, lazily touched pages."""
