"""What Ollama's calls answer."""

from collections.abc import Mapping

from router.answers.words import ANY_OBJECT, COUNT, FLAG, NUMBER, TEXT, Answer, Schema, const, enum, ref, several, shape

_SAID: dict[str, Schema] = {
    "thinking": TEXT,
    "tool_calls": several(shape({"id": TEXT, "function": shape({"name": TEXT, "arguments": ANY_OBJECT})})),
}
_LOGPROB: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": several(COUNT)}
_LINE: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_END: dict[str, Schema] = {
    "done_reason": enum("stop", "length", "load", "unload"),
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "logprobs": several(shape({**_LOGPROB, "top_logprobs": several(shape(_LOGPROB))})),
}
_MESSAGE = shape({"role": const("assistant"), "content": TEXT}, _SAID)
_DETAILS = shape(
    {
        "parent_model": TEXT,
        "format": TEXT,
        "family": TEXT,
        "families": several(TEXT),
        "parameter_size": TEXT,
        "quantization_level": TEXT,
    }
)
_MODEL: dict[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "modified_at": TEXT,
    "size": COUNT,
    "digest": TEXT,
    "details": _DETAILS,
}
_PULLED = shape({"status": TEXT}, {"digest": TEXT, "total": COUNT, "completed": COUNT})

COMPONENTS: Mapping[str, Schema] = {
    "OllamaChat": shape({**_LINE, "message": _MESSAGE}, {**_END, "response": const("")}),
    "OllamaText": shape({**_LINE, "response": TEXT}, {**_END, **_SAID, "context": several(COUNT), "message": _MESSAGE}),
    "OllamaModel": shape(_MODEL),
}

ANSWERS: Mapping[str, Answer] = {
    "ollama_chat": Answer(body=ref("OllamaChat"), frame=ref("OllamaChat"), about="One message of the assistant."),
    "ollama_generate": Answer(body=ref("OllamaText"), frame=ref("OllamaText"), about="Generated text."),
    "ollama_embed": Answer(
        body=shape(
            {"model": TEXT, "embeddings": several(several(NUMBER))},
            {"total_duration": COUNT, "load_duration": COUNT, "prompt_eval_count": COUNT},
        ),
        about="One vector for each text.",
    ),
    "ollama_embeddings": Answer(body=shape({"embedding": several(NUMBER)}), about="One vector."),
    "ollama_tags": Answer(body=shape({"models": several(ref("OllamaModel"))}), about="All models."),
    "ollama_ps": Answer(
        body=shape(
            {
                "models": several(
                    shape(
                        {
                            **_MODEL,
                            "size_vram": COUNT,
                            "expires_at": TEXT,
                            "context_length": COUNT,
                        }
                    )
                )
            }
        ),
        about="The models in memory.",
    ),
    "ollama_version": Answer(body=shape({"version": TEXT}), about="The release of Ollama that has what is here."),
    "ollama_show": Answer(
        body=shape(
            {
                "modified_at": TEXT,
                "details": _DETAILS,
                "model_info": ANY_OBJECT,
                "template": TEXT,
                "capabilities": several(TEXT),
            }
        ),
        about="One model.",
    ),
    "ollama_pull": Answer(body=_PULLED, frame=_PULLED, about="Its files come; the last line says how it ended."),
    "ollama_delete": Answer(media="text/plain", about="Its files are gone. Nothing is said."),
}
