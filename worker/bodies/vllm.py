"""Bodies of vLLM's own calls."""

from worker.bodies.openai import CHAT_TOKENS, MODEL
from worker.schemas import Body, flag, required, text

_TELLING: Body = {"return_token_strs": flag("The tokens come as the tokenizer spells them, too.")}
TOKENIZE_TEXT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "add_special_tokens": flag("With what the tokenizer puts around texts; true unless stated."),
    **_TELLING,
}
TOKENIZE_CHAT: Body = {
    **CHAT_TOKENS,
    "add_special_tokens": flag("With what the tokenizer puts around texts, beside what the chat template writes."),
    **_TELLING,
}
