"""A router over a fleet of language-model workers, one process per model."""
