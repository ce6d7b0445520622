"""Sampling options that a request body sets."""

from typing import Any

from worker.interface import SamplingParams
from worker.prompt import sampling_options
from worker.prompt.body_reader import BodyFields
from worker.prompt.sampling_options import SamplingDefaults
from worker.protocol.dialects.generation_fields import SAMPLING


def read(body: dict[str, Any], defaults: SamplingDefaults | None = None, seed: int | None = None) -> SamplingParams:
    return sampling_options.read(
        BodyFields(body, SAMPLING), defaults or SamplingDefaults(), vocab_size=100, logprobs=None, seed=seed
    )[0]
