"""EricLLM's generate call: a prompt, answered with the prompt and its continuation."""

import uuid
from collections.abc import Iterable

from worker.api.call import GenerationCall, ReplyWriter
from worker.api.openai import ParsedCompletion, parse_text
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue
from worker.interface import Delta
from worker.prompt.body_reader import BodyFields, Json
from worker.protocol.dialects.ericllm import GENERATE, SAME_AS_OPENAI

_DEFAULTS = {"max_tokens": 128, "temperature": 0.7, "top_k": 40, "top_p": 0.5}
# Values of `top_a` that mean nothing special: EricLLM's own default, and off.
_TOP_A = (None, 0.0, 1.0)


async def generate(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a completion of one prompt. Raise RequestError."""
    fields = BodyFields(body, GENERATE)
    if fields.number("top_a") not in _TOP_A:
        fields.mark_unused("top_a")  # EricLLM reads it, and its sampler does not get it (ericLLM.py, inference_loop)
    fields.refuse("filters", "filters are not supported; use a grammar with POST /v1/completions")
    openai_body: Json = {name: fields.checked(name) for name in SAME_AS_OPENAI}
    openai_body |= {name: value for name, value in _DEFAULTS.items() if openai_body[name] is None}
    openai_body["repetition_penalty"] = fields.checked("token_repetition_penalty")
    prompt = fields.text("prompt")
    if prompt is None:
        raise InvalidValue("prompt must be a string; send inputs to POST /invocations", param="prompt")
    parsed = await parse_text({**openai_body, "prompt": prompt}, model, id=f"text-{uuid.uuid4().hex}")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    return parsed.call(EricLlmWriter(prompt, parsed), ignored=ignored)


class EricLlmWriter(ReplyWriter):
    """Writer of `{text}`, a list for several choices."""

    def __init__(self, prompt: str, parsed: ParsedCompletion):
        self._texts = [prompt] * parsed.generations[0].n

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        for _, delta in deltas:
            self._texts[delta.index] += delta.text
        return {"text": self._texts[0] if len(self._texts) == 1 else self._texts}

    def frames(self, number: int, delta: Delta) -> bytes:
        raise AssertionError("this call does not stream")
