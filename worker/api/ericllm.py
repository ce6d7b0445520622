"""EricLLM's one call: a prompt, and the prompt with what follows it."""

import uuid
from collections.abc import Iterable

from worker.api.call import Call, Model
from worker.api.openai import Chat, understand_text
from worker.errors import InvalidValue
from worker.interface import Delta
from worker.prompt.body_reader import Fields, Json
from worker.protocol.dialects.ericllm import ERICLLM

_DEFAULTS = {"max_tokens": 128, "temperature": 0.7, "top_k": 40, "top_p": 0.5}
_SAME = (*_DEFAULTS, "min_p", "stop", "n", "seed", "model")


async def generate(body: Json, model: Model) -> Call:
    """A text completion of one prompt; raises RequestError."""
    fields = Fields(body, ERICLLM)
    fields.refuse("top_a", "top_a is not supported; leave it out")
    fields.refuse("filters", "filters are not supported; use a grammar with POST /v1/completions")
    fields.refuse("skip_special_tokens", "skip_special_tokens must be true: special tokens are not shown")
    asked: Json = {name: fields.handed(name) for name in _SAME}
    asked |= {name: value for name, value in _DEFAULTS.items() if asked[name] is None}
    asked["repetition_penalty"] = fields.handed("token_repetition_penalty")
    prompt = fields.text("prompt")
    if prompt is None:
        raise InvalidValue("prompt must be a string; inputs are for POST /invocations", param="prompt")
    ignored = fields.settle(strict=model.options.strict_fields)
    chat = await understand_text({**asked, "prompt": prompt}, model, id=f"text-{uuid.uuid4().hex}")
    return Call(generations=chat.generations, reply=_Reply(prompt, chat), ignored=(*ignored, *chat.ignored))


class _Reply:
    """`{text}`, of several choices a list."""

    def __init__(self, prompt: str, chat: Chat):
        self._texts = [prompt] * chat.generations[0].n

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        for _, delta in deltas:
            self._texts[delta.index] += delta.text
        return {"text": self._texts[0] if len(self._texts) == 1 else self._texts}

    def frames(self, number: int, delta: Delta) -> bytes:
        raise AssertionError("this call does not stream")

    def closing(self) -> bytes:
        raise AssertionError("this call does not stream")
