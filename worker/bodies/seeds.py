"""Bodies of LMI's, EricLLM's and FastChat's calls."""

from worker.bodies.common import LARGEST, MAX_CHOICES, SAMPLING, STOP, TUNING
from worker.bodies.openai import ADAPTERS, COMMON, EMBEDDINGS, MAX_TOKENS, MODEL
from worker.schemas import Body, array, flag, integer, one_of, record, required, text

# LMI and EricLLM

PARAMETERS: Body = {
    **{
        name: TUNING[name]
        for name in (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
    },
    "seed": SAMPLING["seed"],
    "do_sample": flag(),
    "max_new_tokens": integer(1, None, "30 unless stated."),
    "stop_sequences": STOP,
    "stop": STOP,
    "ignore_eos_token": flag(),
    "details": flag(),
    "return_full_text": flag(),
    "num_beams": one_of([1]),
    "typical_p": one_of([1]),
}  # fmt: skip
INVOCATIONS: Body = {
    "model": MODEL,
    "inputs": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
    "parameters": record(PARAMETERS),
    "stream": flag(),
    "adapters": ADAPTERS,
}
ERICLLM: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "max_tokens": MAX_TOKENS,
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "min_p": TUNING["min_p"],
    "stop": STOP,
    "n": integer(1, MAX_CHOICES),
    "seed": SAMPLING["seed"],
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": one_of([0]),
    "filters": one_of([[]]),
    "skip_special_tokens": one_of([True]),
}

# FastChat's worker

FASTCHAT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "repetition_penalty": TUNING["repetition_penalty"],
    "presence_penalty": TUNING["presence_penalty"],
    "frequency_penalty": TUNING["frequency_penalty"],
    "max_new_tokens": integer(1, None, "256 unless stated."),
    "echo": flag("Whether the text begins with the prompt; true unless stated."),
    "stop": STOP,
    "stop_token_ids": COMMON["stop_token_ids"],
    "logprobs": integer(0, None, "At most the model's max-logprobs."),
    "seed": SAMPLING["seed"],
    "stream": flag("Makes no difference: the path says it."),
    "best_of": one_of([1]),
    "use_beam_search": one_of([False]),
    "images": one_of([[]]),
}
FASTCHAT_EMBED: Body = EMBEDDINGS
FASTCHAT_COUNT: Body = {"model": MODEL, "prompt": required(text())}
FASTCHAT_CONV: Body = {"model": MODEL}
FASTCHAT_CHECK: Body = {
    "prompts": required(
        array(record({"model": MODEL, "prompt": required(text()), "max_tokens": integer(0, LARGEST)}), most=256)
    )
}
