"""OpenAI's embeddings: texts to vectors."""

import base64
import struct
from math import hypot

from worker.errors import ContextExceeded, InvalidValue
from worker.faces import Model, Result, read_texts
from worker.fields import Fields, Json


async def embeddings(body: Json, model: Model) -> Result:
    """One vector per input; raises RequestError. Cancelling drops the work."""
    model.require("embedding")
    fields = Fields(body)
    name = fields.text("model") or model.options.name
    is_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    dimensions = fields.integer("dimensions", 1)
    prompts, _ = await read_texts(fields, "input", model)
    ignored = fields.settle(strict=model.options.strict_fields)
    limit = min(model.options.max_input_tokens or model.engine.ctx_size, model.engine.ctx_size)
    for prompt in prompts:
        if len(prompt) > limit:
            raise ContextExceeded(len(prompt), limit, param="input")
    vectors = await model.engine.embed(prompts)
    if dimensions is not None:
        vectors = [shorten(vector, dimensions) for vector in vectors]
    tokens = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": to_base64(vector) if is_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Result(
        body={"object": "list", "data": data, "model": name, "usage": usage}, ignored=ignored, prompt_tokens=tokens
    )


def shorten(vector: list[float], dimensions: int) -> list[float]:
    """The first `dimensions` components, of length 1 again (Kusupati et al. 2022); raises InvalidValue if it has
    fewer."""
    if dimensions > len(vector):
        raise InvalidValue(
            f"dimensions must be at most {len(vector)}, the size of this model's vectors", param="dimensions"
        )
    kept = vector[:dimensions]
    length = hypot(*kept)
    return [value / length for value in kept] if length else kept


def to_base64(vector: list[float]) -> str:
    """Little-endian float32, four bytes a component."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
