"""The packages of the extra `worker`, which a base installation lacks."""

import importlib.util
import sys

from router import DISTRIBUTION

# Packages of the extra `worker` without which no model loads. Pillow is not among them: without it, models with vision
# are served for text (worker/engines/transformers/run/vision.py).
NEEDED = ("accelerate", "jinja2", "llguidance", "safetensors", "torch", "transformers")


def missing_packages() -> str:
    """The packages of a worker that this interpreter lacks, with the remedy; empty if it has all of them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]  # finds torch without importing it
    if not missing:
        return ""
    return (
        f"{sys.executable} has no {', '.join(missing)}, so it can load no model: run pip install"
        f" '{DISTRIBUTION}[worker]' (in a checkout: bash scripts/run.sh), or set python = an interpreter that has it"
    )
