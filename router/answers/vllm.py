"""What vLLM's own calls answer."""

from router.answers.words import COUNT, TEXT, maybe, several, shape

COUNTED = shape({"count": COUNT, "max_model_len": COUNT, "tokens": several(COUNT), "token_strs": maybe(several(TEXT))})
"""`/tokenize`, where it is asked as vLLM's clients do."""
