"""llama-server's own calls: completions, gaps to fill in, and a chat as the prompt that its template makes."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from worker.api.call import Call, Model, Result, read_ping_interval, read_texts
from worker.api.llama_server_replies import NativeReply
from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import Generation, Sampling
from worker.prompt import (
    adapter_choice,
    chat_template,
    guided_decoding,
    llama_server_samplers,
    logprob_options,
    sampling_options,
)
from worker.prompt.body_reader import Fields, Json
from worker.prompt.fill_in_the_middle import Filling
from worker.protocol.dialects.generation_fields import MAX_SHOWN, MAX_TEXTS
from worker.protocol.dialects.llama_server import COMPLETION, INFILL
from worker.protocol.dialects.openai import TEMPLATE


async def completion(body: Json, model: Model) -> Call:
    """Text that goes on from a prompt, or from each of several; raises RequestError."""
    model.require("completion")
    fields = Fields(body, COMPLETION)
    prompts, texts = await read_texts(fields, "prompt", model)
    told = [model.decode(prompt) if text is None else text for prompt, text in zip(prompts, texts, strict=True)]
    return _completion(fields, model, prompts, told)


async def infill(body: Json, model: Model) -> Call:
    """What stands between two texts; raises RequestError, UnsupportedByModel for a model without tokens for that."""
    model.require("completion")
    fields = Fields(body, INFILL)
    prompt = await _gap(fields, model)
    return _completion(fields, model, [prompt], [model.decode(prompt)])


def _completion(fields: Fields, model: Model, prompts: list[list[int]], texts: list[str]) -> Call:
    """All but the prompts."""
    alternatives = logprob_options.alternatives(fields, "n_probs", model.options.max_logprobs)
    tells_odds = fields.flag("post_sampling_probs") or False
    fields.refuse("n_indent", "n_indent is not supported; leave it out")
    fields.refuse("return_tokens_only", "return_tokens_only is not supported; leave it out")
    options = model.options
    picked, stop = sampling_options.read(
        fields,
        model.defaults,
        vocab_size=model.vocab_size,
        logprobs=alternatives or None,
        seed=options.seed if options.seed >= 0 else None,
        encode=model.encode_piece,
    )
    shown = _names(fields, "response_fields")
    grammar = guided_decoding.read(fields)
    stream = fields.flag("stream") or False
    name = fields.text("model") or options.name
    returns_tokens = fields.flag("return_tokens") or False
    has_progress = _of_stream(fields, "return_progress", stream)
    max_tokens = _n_predict(fields, options.n_predict)
    has_timings = _of_stream(fields, "timings_per_token", stream)
    n = _choices(fields)
    ping_interval = read_ping_interval(fields)
    adapters = adapter_choice.read(fields, "lora", "adapters", prompts=len(prompts))
    ignored = fields.settle(strict=options.strict_fields)
    for prompt in prompts:
        model.check_prompt(prompt, param="prompt")
    id = f"cmpl-{uuid.uuid4().hex}"
    generations = tuple(
        Generation(
            id=f"{id}.{number}",
            prompt=tuple(prompt),
            adapter=adapters[number],
            max_tokens=max_tokens,
            stop=stop,
            n=n,
            sampling=replace(picked, tells_odds=tells_odds),
            grammar=grammar,
            timings=has_timings,
            progress=stream,  # comments tell it, where chunks do not
        )
        for number, prompt in enumerate(prompts)
    )
    reply = NativeReply(
        generations,
        prompts=texts,
        settings=_settings(generations[0].sampling, max_tokens, stop, stream=stream),
        model=name,
        returns_tokens=returns_tokens,
        has_progress=has_progress,
        shown=shown,
    )
    return Call(generations=generations, reply=reply, stream=stream, ping_interval=ping_interval, ignored=ignored)


def _n_predict(fields: Fields, default: int) -> int | None:
    """New tokens at most; -1 is all that fits, 0 only reads the prompt."""
    stated, same = fields.integer("n_predict"), fields.integer("max_tokens")
    if stated is not None and same is not None and stated != same:
        raise InvalidValue("n_predict and max_tokens mean the same but differ; state one", param="max_tokens")
    tokens = same if stated is None else stated
    tokens = default if tokens is None else tokens
    return None if tokens < 0 else tokens


def _choices(fields: Fields) -> int:
    stated, same = fields.integer("n"), fields.integer("n_cmpl")
    if stated is not None and same is not None and stated != same:
        raise InvalidValue("n and n_cmpl mean the same but differ; state one", param="n_cmpl")
    return stated or same or 1


async def _gap(fields: Fields, model: Model) -> list[int]:
    """The prompt of a gap: further files, what goes before and what follows, and what the answer begins with."""
    filling = model.filling
    if filling is None:
        raise UnsupportedByModel(
            "this model has no tokens to fill in the middle; ask one that was trained to, most coders were"
        )
    before, behind, begun = (fields.text(name) for name in ("input_prefix", "input_suffix", "prompt"))
    for name, stated in (("input_prefix", before), ("input_suffix", behind)):
        if stated is None:
            raise InvalidValue(f"{name} must be a string", param=name)
    files = fields.sequence("input_extra") or []
    if len(files) > MAX_TEXTS or not all(map(_is_file, files)):
        raise InvalidValue(
            f"input_extra must be an array of at most {MAX_TEXTS} objects with a text and perhaps a filename, strings",
            param="input_extra",
        )
    prefix, suffix, start = await model.encode([text or "" for text in (before, behind, begun)], add_special=False)
    return [*model.start, *await _files(files, filling, model), *filling.around(prefix, suffix), *start]


async def _files(files: Sequence[Json], filling: Filling, model: Model) -> list[int]:
    """Further files, as models see those of a repository in training, or one behind another."""
    if not files:
        return []
    pieces: list[tuple[int | None, str]] = []
    if filling.file is None:
        pieces += [(None, f"\n\n--- snippet ---\n\n{each['text']}") for each in files]
    else:
        pieces += [(filling.repository, "myproject\n")] if filling.repository is not None else []
        pieces += [(filling.file, f"{each.get('filename') or 'tmp'}\n{each['text']}") for each in files]
        pieces += [(filling.file, "filename\n")]
    encoded = await model.encode([text for _, text in pieces], add_special=False)
    marked = zip([mark for mark, _ in pieces], encoded, strict=True)
    return [id for mark, tokens in marked for id in ([] if mark is None else [mark]) + tokens]


def _is_file(stated: Any) -> bool:
    return (
        isinstance(stated, dict)
        and isinstance(stated.get("text"), str)
        and isinstance(stated.get("filename", ""), str | None)
    )


def _names(fields: Fields, name: str) -> list[str]:
    listed = fields.sequence(name) or []
    if not all(isinstance(each, str) for each in listed) or len(listed) > MAX_SHOWN:
        raise InvalidValue(f"{name} must be an array of at most {MAX_SHOWN} names of fields", param=name)
    return listed


def _of_stream(fields: Fields, name: str, stream: bool) -> bool:
    is_set = fields.flag(name) or False
    if is_set and not stream:
        fields.mark_unused(name)
    return is_set and stream


def _settings(picked: Sampling, max_tokens: int | None, stop: tuple[str, ...], *, stream: bool) -> Json:
    """What was understood, in llama-server's words."""
    known = asdict(picked)
    known["repeat_penalty"] = known.pop("repetition_penalty")
    known["samplers"] = llama_server_samplers.told(known)
    known["post_sampling_probs"] = known.pop("tells_odds")
    del known["tempers_last"]
    known["n_probs"] = known.pop("logprobs") or 0
    known["logit_bias"] = [{"token": token, "bias": bias} for token, bias in picked.logit_bias.items()]
    return {**known, "n_predict": -1 if max_tokens is None else max_tokens, "stop": list(stop), "stream": stream}


async def apply_template(body: Json, model: Model) -> Result:
    """The prompt that a chat with this body would start from; raises RequestError."""
    fields = Fields(body, TEMPLATE)
    conversation = chat_template.read(fields, model.template)
    fields.skip(TEMPLATE)
    ignored = fields.settle(strict=model.options.strict_fields)
    return Result(body={"prompt": await model.render(conversation)}, ignored=ignored)
