"""What the fields of a body say of sampling."""

from typing import Any

from worker.interface import Sampling
from worker.prompt import sampling_options
from worker.prompt.body_reader import Fields
from worker.prompt.sampling_options import Defaults
from worker.protocol.dialects.generation_fields import SAMPLING


def read(body: dict[str, Any], defaults: Defaults | None = None, seed: int | None = None) -> Sampling:
    return sampling_options.read(
        Fields(body, SAMPLING), defaults or Defaults(), vocab_size=100, logprobs=None, seed=seed
    )[0]
