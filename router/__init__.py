"""A router over a fleet of language-model workers, one process per model."""

__version__ = "0.1.0"
DISTRIBUTION = "llm-fleet-router"  # the name of both packages on the package index
