"""The request members in the option tables: each is sent to a worker's server with a fake engine.

The settings are the fields of the engine's request, such as `max_tokens = 5`, the paths of the members of the answer,
such as `details.prefill`, and its texts, such as `answer.text = "hi"`. Warnings are the names in `X-Ignored-Fields`,
problems are error messages.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from router.config.effective import BUILT_IN
from tests.worker.serving import serving
from worker.interface import GenerationRequest

# The call of each page and the members that it needs.
CALLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lmi": ("/invocations", {"inputs": "hi ho"}),
    "fastchat": ("/worker_generate", {"prompt": "hi ho"}),
    "ericllm": ("/generate", {"prompt": "hi ho"}),
}
# Request members in the documents or the source of each system.
DOCUMENTED_MEMBERS = {
    # lmi_input_output_schema.md of DJL Serving: common parameters, vLLM's, TensorRT-LLM's
    "lmi": """
        stream do_sample seed temperature repetition_penalty top_k top_p max_new_tokens details return_full_text
        stop_sequences decoder_input_details min_p presence_penalty frequency_penalty n best_of num_beams length_penalty
        early_stopping stop_token_ids include_stop_str_in_output ignore_eos_token logprobs prompt_logprobs
        skip_special_tokens spaces_between_special_tokens min_length bad_sequences stop top_n_tokens truncate
    """,
    # get_gen_params of fastchat/serve/openai_api_server.py, and what its workers read
    "fastchat": """
        temperature logprobs top_p top_k presence_penalty frequency_penalty max_new_tokens echo stop_token_ids images
        best_of use_beam_search stop repetition_penalty
    """,
    # PromptRequest of ericLLM.py
    "ericllm": """
        max_tokens temperature top_k top_p token_repetition_penalty stop skip_special_tokens n top_a min_p filters
    """,
}


def ask(page: str, given: tuple[str, ...]) -> tuple[str, str, dict[str, tuple[str, str]]]:
    """Send the call of `page` with the members of the JSON objects `given`. Return problems, warnings and settings."""
    path, needed = CALLS[page]
    body = {**needed, **{name: value for text in given for name, value in json.loads(text).items()}}
    return asyncio.run(_ask(path, body))


async def _ask(path: str, body: Mapping[str, Any]) -> tuple[str, str, dict[str, tuple[str, str]]]:
    async with serving() as world, world.client.post(world.url + path, json=body) as answer:
        text, ignored = await answer.text(), answer.headers.get("X-Ignored-Fields", "")
        if answer.status != 200:
            return text, ignored, {}
        lines = text.splitlines() if answer.content_type == "application/jsonlines" else [text]
        found = dict(entry for line in lines for entry in _members(json.loads(line)))
        found |= _fields(world.engine.requests[-1])
    return "", ignored, {key: (value, BUILT_IN) for key, value in found.items()}


def _fields(request: GenerationRequest) -> dict[str, str]:
    """The fields of a request for the engine as JSON, those of its sampling parameters by their own names."""
    fields = asdict(request)
    return {name: json.dumps(value, default=list) for name, value in {**fields, **fields.pop("sampling")}.items()}


def _members(value: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """The paths of all members of an answer, and its texts; entries of lists have no part of the path."""
    if isinstance(value, list):
        for entry in value:
            yield from _members(entry, before)
    elif isinstance(value, dict):
        for name, member in value.items():
            yield before + name, ""
            if isinstance(member, str):
                yield f"answer.{before}{name}", json.dumps(member, ensure_ascii=False)
            yield from _members(member, f"{before}{name}.")
