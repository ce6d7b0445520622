"""What calls answer when all goes well: the JSON of each, and of the frames of its stream, as JSON Schema. Law: PURE.

Written by hand beside the code that answers; the tests hold every answer to it, with no member more and none less.
"""

from collections.abc import Mapping

from router.answers import anthropic, llama_server, ollama, openai, own, responses, seeds, vllm
from router.answers.words import Answer, Schema

COMPONENTS: Mapping[str, Schema] = {
    **openai.COMPONENTS, **llama_server.COMPONENTS, **responses.COMPONENTS, **anthropic.COMPONENTS,
    **ollama.COMPONENTS, **seeds.COMPONENTS,
}  # fmt: skip
"""What several answers have in common, by the name that they refer to it by."""
ANSWERS: Mapping[str, Answer] = {
    **openai.ANSWERS, **llama_server.ANSWERS, **responses.ANSWERS, **anthropic.ANSWERS, **ollama.ANSWERS,
    **seeds.ANSWERS, **vllm.ANSWERS, **own.ANSWERS,
}  # fmt: skip
"""By the name of the route. Calls that are never answered well are not here."""
