"""What the fields of a body say of sampling."""

from typing import Any

from worker import sampling
from worker.fields import Fields
from worker.generation import Sampling
from worker.protocol.dialects.generation_fields import SAMPLING
from worker.sampling import Defaults


def read(body: dict[str, Any], defaults: Defaults | None = None, seed: int | None = None) -> Sampling:
    return sampling.read(Fields(body, SAMPLING), defaults or Defaults(), vocab_size=100, logprobs=None, seed=seed)[0]
