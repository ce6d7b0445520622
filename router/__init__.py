"""A router over a fleet of language-model workers, one process per model."""

__version__ = "0.1.0"
