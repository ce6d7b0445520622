"""A worker: one process that serves one model."""
