"""What vLLM's own calls answer, and Cohere's, as it offers them."""

from collections.abc import Mapping

from router.answers.words import COUNT, NUMBER, TEXT, WHOLE, Answer, const, maybe, ref, several, shape

COUNTED = shape({"count": COUNT, "max_model_len": COUNT, "tokens": several(COUNT), "token_strs": maybe(several(TEXT))})
"""`/tokenize`, where it is asked as vLLM's clients do."""
ANSWERS: Mapping[str, Answer] = {
    "score": Answer(
        body=shape(
            {
                "id": TEXT,
                "object": const("list"),
                "created": COUNT,
                "model": TEXT,
                "data": several(shape({"index": COUNT, "object": const("score"), "score": NUMBER})),
                "usage": ref("PromptUsage"),
            }
        ),
        about="How well texts fit each other, pair by pair.",
    ),
    "cohere_embed": Answer(
        body=shape(
            {
                "id": TEXT,
                "embeddings": shape(
                    {},
                    {
                        "float": several(several(NUMBER)),
                        "base64": several({"type": "string", "contentEncoding": "base64"}),
                        "binary": several(several(WHOLE)),
                        "ubinary": several(several(COUNT)),
                    },
                ),
                "texts": maybe(several(TEXT)),
                "meta": shape(
                    {"api_version": shape({"version": TEXT}), "billed_units": shape({"input_tokens": COUNT})}
                ),
                "response_type": const("embeddings_by_type"),
            }
        ),
        about="One vector for each text, in each of the types asked for.",
    ),
    "version": Answer(body=shape({"version": TEXT}), about="The router's version."),
}
