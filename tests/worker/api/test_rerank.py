"""Rerank, score, llama-server's embeddings, and instructions: inputs, outputs and rejections."""

from typing import Any

import pytest

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from tests.worker.speaking import encoded, seen
from worker.api import embeddings
from worker.api.served_model import ServedModel
from worker.errors import ContextExceeded, InvalidValue, UnsupportedByModel, UnsupportedField
from worker.interface import EncodingConfig

DOCUMENTS = ["hi", {"text": "a much longer one"}, "hello you"]


def model(
    *capabilities: str, encoding: EncodingConfig | None = None, ctx_size: int = 256, **settings: Any
) -> ServedModel:
    """Return a model; by default a cross-encoder, whose score is the number of a pair's tokens."""
    engine = FakeEngine(
        serving.tokenizer(), capabilities=capabilities or ("rerank",), encoding=encoding, ctx_size=ctx_size
    )
    return ServedModel(engine, engine.tokenizer, serving.options(**settings))


def embedder(**settings: Any) -> ServedModel:
    prompts = {"query": "? ", "document": "", "title": "# "}
    encoding = EncodingConfig(dimensions=4, prompts=prompts, default_prompt="# ", skips_prompt=True)
    return model("embedding", "rerank", encoding=encoding, **settings)


async def test_documents_are_sorted_by_score_with_their_indices() -> None:
    made = model()
    result = await embeddings.rerank({"query": "what?", "documents": DOCUMENTS, "model": "m"}, made)
    sizes = [len(made.tokenizer("what?", text)["input_ids"]) for text in ("hi", "a much longer one", "hello you")]
    assert sizes[1] > sizes[2] > sizes[0]
    assert result.body.pop("id").startswith("rerank-")
    assert result.body == {
        "model": "m",
        "object": "list",
        "results": [{"index": index, "relevance_score": float(sizes[index])} for index in (1, 2, 0)],
        "usage": {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)},
    }
    assert result.prompt_tokens == sum(sizes)


async def test_top_n_limits_the_results_and_texts_are_returned_on_request() -> None:
    body = {"query": "q", "documents": DOCUMENTS, "top_n": 1, "return_documents": True, "rank_fields": ["text"]}
    result = await embeddings.rerank(body, model())
    assert [each["document"] for each in result.body["results"]] == [{"text": "a much longer one"}]
    assert result.ignored == ("rank_fields",)
    many = await embeddings.rerank({**body, "top_n": 50}, model())
    assert len(many.body["results"]) == 3


async def test_texts_return_a_plain_list_as_in_text_embeddings_inference() -> None:
    given = ["a", "bb", "ccc"]
    listed = (await embeddings.rerank({"query": "q", "documents": given, "top_n": 2}, model())).body["results"]
    texts = {"query": "q", "texts": given, "top_n": 2}
    bare = (await embeddings.rerank(texts, model())).body
    assert bare == [{"index": each["index"], "score": each["relevance_score"]} for each in listed]
    shown = (await embeddings.rerank({**texts, "return_text": True, "raw_scores": False}, model())).body
    assert [each["text"] for each in shown] == [given[each["index"]] for each in listed]
    with pytest.raises(UnsupportedField, match="raw_scores"):
        await embeddings.rerank({**texts, "raw_scores": True}, model())


async def test_equal_documents_keep_their_order() -> None:
    result = await embeddings.rerank({"query": "q", "documents": ["same"] * 5}, model())
    assert [each["index"] for each in result.body["results"]] == [0, 1, 2, 3, 4]


async def test_an_embedder_ranks_by_its_prompts_for_queries_and_documents() -> None:
    made = embedder()
    result = await embeddings.rerank({"query": "why", "documents": ["so", "because"]}, made)
    assert seen(made) == ["? why", "so", "because"]
    assert {each["index"] for each in result.body["results"]} == {0, 1}


async def test_a_long_pair_is_rejected_unless_truncation_is_allowed() -> None:
    body = {"query": "why", "documents": ["x" * 300, "y"]}
    for made in (model(ctx_size=64), embedder(ctx_size=64), model(max_input_tokens=64)):
        with pytest.raises(ContextExceeded) as caught:
            await embeddings.rerank(body, made)
        assert caught.value.param == "documents"
        await embeddings.rerank({**body, "truncate": True}, made)
        assert max(len(text.tokens) for text in encoded(made)) == 64
        assert "y" in seen(made)[-1]


async def test_a_model_that_cannot_rerank_names_its_calls() -> None:
    with pytest.raises(UnsupportedByModel, match="/v1/chat/completions"):
        await embeddings.rerank({"query": "a", "documents": ["b"]}, model("completion"))
    for face in (embeddings.embeddings, embeddings.native):
        with pytest.raises(UnsupportedByModel, match="/v1/rerank"):
            await face({"input": "a"}, model())


async def test_an_instruction_precedes_texts_and_its_length_is_passed_on() -> None:
    made = embedder()
    await embeddings.embeddings({"input": ["one", "two"]}, made)
    await embeddings.embeddings({"input": "three", "prompt_name": "query"}, made)
    await embeddings.embeddings({"input": "four", "prompt_name": "document"}, made)
    assert seen(made) == ["# one", "# two", "? three", "four"]
    skipped = [text.skipped for text in encoded(made)]
    assert skipped == [*[len(made.tokenizer(prompt)["input_ids"]) for prompt in ("# ", "# ", "? ")], 0]
    with pytest.raises(InvalidValue, match="document, query, title"):
        await embeddings.embeddings({"input": "a", "prompt_name": "clustering"}, made)


async def test_token_ids_are_unchanged() -> None:
    made = embedder()
    await embeddings.embeddings({"input": [5, 6]}, made)
    await embeddings.embeddings({"input": [5] * 300, "truncate": True}, made)
    cut = {"input": [5] * 300, "truncate_prompt_tokens": -1}
    await embeddings.embeddings({**cut, "truncation_side": "right"}, made)
    with pytest.raises(UnsupportedField, match="only the end"):
        await embeddings.embeddings({**cut, "truncation_side": "left"}, made)
    await embeddings.embeddings({"input": [5] * 300, "truncate_prompt_tokens": 4}, made)
    await embeddings.embeddings({"input": [5] * 300, "truncate_prompt_tokens": 1000}, made)
    assert [list(text.tokens) for text in encoded(made)] == [[5, 6], *[[5] * 256] * 2, [5] * 4, [5] * 256]
    with pytest.raises(InvalidValue) as caught:
        await embeddings.embeddings({"input": [5, 6], "prompt_name": "query"}, made)
    assert caught.value.param == "prompt_name"


async def test_the_error_for_token_ids_of_another_model_names_the_remedy() -> None:
    made = embedder()
    with pytest.raises(InvalidValue, match="send text instead of token ids of another model"):
        await embeddings.embeddings({"input": [[len(made.tokenizer)]]}, made)


async def test_a_text_is_truncated_by_its_tokenizer() -> None:
    made = embedder(max_input_tokens=20)
    text = "the quick brown fox " * 20
    await embeddings.embeddings({"input": ["fox", text], "truncate": True}, made)
    expected = made.tokenizer("# " + text, truncation=True, max_length=20)["input_ids"]
    assert list(encoded(made)[1].tokens) == expected
    assert len(made.tokenizer(text)["input_ids"]) > 20, "the tokenizer itself still reads all of it"


async def test_a_text_is_truncated_to_the_tokens_that_the_request_names() -> None:
    made = embedder()
    text = "The quick brown fox. " * 20
    await embeddings.embeddings({"input": ["fox", text], "truncate_prompt_tokens": 12}, made)
    expected = made.tokenizer("# " + text, truncation=True, max_length=12)["input_ids"]
    assert list(encoded(made)[-1].tokens) == expected
    with pytest.raises(InvalidValue, match=r"above \d+, the tokens of the model's instruction") as caught:
        await embeddings.embeddings({"input": text, "truncate_prompt_tokens": 1}, made)
    assert caught.value.param == "truncate_prompt_tokens"


async def test_a_pair_is_truncated_to_the_tokens_that_the_request_names() -> None:
    made = model()
    body: dict[str, Any] = {"query": "what?", "documents": ["hi", "a much longer one" * 9]}
    result = await embeddings.rerank({**body, "truncate_prompt_tokens": 14}, made)
    sizes = {found["index"]: found["relevance_score"] for found in result.body["results"]}
    assert sizes == {0: len(made.tokenizer("what?", "hi")["input_ids"]), 1: 14}
    scored = await embeddings.score(
        {"text_1": "what?", "text_2": "a much longer one", "truncate_prompt_tokens": 9}, made
    )
    assert scored.body["data"][0]["score"] == 9
    with pytest.raises(InvalidValue, match=r"must be at least \d+ for this model") as caught:
        await embeddings.rerank({**body, "truncate_prompt_tokens": 1}, made)
    assert caught.value.param == "truncate_prompt_tokens"


async def test_the_error_for_a_long_input_names_the_setting_with_the_limit() -> None:
    for made, setting in ((embedder(max_input_tokens=20), "max-input-tokens"), (embedder(ctx_size=20), "ctx-size")):
        await embeddings.embeddings({"input": [5] * 20}, made)
        with pytest.raises(
            ContextExceeded, match=f"length is 20 tokens; shorten the prompt or raise {setting}"
        ) as long:
            await embeddings.embeddings({"input": [[5], [5] * 21]}, made)
        assert (long.value.status, long.value.param) == (400, "input")


async def test_llama_servers_embeddings_have_a_list_for_each_text() -> None:
    made = embedder()
    result = await embeddings.native({"content": "hi", "embd_normalize": -1}, made)
    count = len(made.tokenizer("# hi")["input_ids"])
    assert result.body == [{"index": 0, "embedding": [[float(count * part) for part in (1, 2, 3, 4)]]}]
    assert result.prompt_tokens == count
    both = await embeddings.native({"input": ["a", "b"]}, made)
    assert [each["index"] for each in both.body] == [0, 1]
    with pytest.raises(InvalidValue) as caught:
        await embeddings.native({}, made)
    assert caught.value.param == "input"


async def test_without_pooling_llama_servers_embeddings_have_a_vector_for_each_token() -> None:
    made = model("embedding", encoding=EncodingConfig(dimensions=2, is_pooled=False))
    result = await embeddings.native({"content": [5, 6]}, made)
    assert result.body == [{"index": 0, "embedding": [[5.0, 5.0], [6.0, 6.0]]}]
    assert made.capabilities == ["embedding"]


def engine() -> FakeEngine:
    return FakeEngine(serving.tokenizer(), capabilities=("embedding", "rerank"))


async def test_all_paths_of_reranking_and_embedding_are_served() -> None:
    async with serving.serving(engine()) as up:
        for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank"):
            status, _, body = await up.post(path, {"query": "a", "documents": ["b"]})
            assert (status, body["results"][0]["index"]) == (200, 0)
        for path in ("/embedding", "/embeddings"):
            status, _, body = await up.post(path, {"content": "b"})
            assert (status, len(body[0]["embedding"])) == (200, 1)
        assert up.events[0].prompt_tokens > 0


async def test_llama_servers_text_objects_are_embedded_and_media_rejected() -> None:
    made = embedder()
    plain = await embeddings.embeddings({"input": ["a", "bc"]}, made)
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    spelt = await embeddings.embeddings({"input": [{"prompt_string": "a"}, {"content": parts}]}, made)
    assert (spelt.body, spelt.ignored) == (plain.body, ())
    for media in ({"prompt_string": "a", "multimodal_data": ["aGk="]}, {"content": [{"type": "image_url"}]}):
        with pytest.raises(UnsupportedField) as caught:
            await embeddings.native({"input": media}, made)
        assert caught.value.param == "input"


async def test_texts_are_scored_pair_by_pair_or_one_with_each_of_several() -> None:
    made = model()
    others = ["hi", "a much longer one"]
    sizes = [len(made.tokenizer("what?", text)["input_ids"]) for text in others]
    result = await embeddings.score({"text_1": "what?", "text_2": others, "model": "m"}, made)
    assert {**result.body, "id": "", "created": 0} == {
        "id": "",
        "object": "list",
        "created": 0,
        "model": "m",
        "data": [{"index": index, "object": "score", "score": float(size)} for index, size in enumerate(sizes)],
        "usage": {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)},
    }
    paired = await embeddings.score({"queries": ["what?"] * 2, "documents": others}, made)
    assert paired.body["data"] == result.body["data"]
    for first, second in (("queries", "items"), ("data_1", "data_2")):
        single = await embeddings.score({first: "what?", second: "hi"}, made)
        assert [each["score"] for each in single.body["data"]] == [sizes[0]]


async def test_an_embedder_scores_by_the_angle_between_vectors_with_its_prompts() -> None:
    made = embedder()
    one, two, left, right = (len(made.tokenizer(text)["input_ids"]) for text in ("? a", "? a b", "b", "c d"))
    for queries, sizes in (("a", (one, one)), (["a", "a b"], (one, two))):
        result = await embeddings.score({"queries": queries, "documents": ["b", "c d"]}, made)
        # the engine's vectors are (1, 2, 3, 4) times the number of tokens, and it does not normalize
        assert [each["score"] for each in result.body["data"]] == [sizes[0] * left * 30.0, sizes[1] * right * 30.0]
    assert seen(made) == ["? a", "b", "c d", "? a", "? a b", "b", "c d"]


@pytest.mark.parametrize("field", ["documents", "texts"])
async def test_a_document_is_cut_to_max_tokens_per_doc(field: str) -> None:
    texts = ["Ä much longer one 🦊", "hi"]
    for made in (model(), embedder()):
        ids = made.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        assert len(ids) > 4
        body = {"query": "q", field: texts, "max_tokens_per_doc": 4}
        answer = await embeddings.rerank(body, made)
        assert answer.ignored == ()
        first, second = seen(made)[-2:]
        kept = str(made.tokenizer.decode(ids[:4]))
        assert texts[0].startswith(kept)
        assert first.endswith(kept)
        assert second.endswith("hi")
        whole = await embeddings.rerank({**body, "max_tokens_per_doc": 0}, made)
        assert whole.prompt_tokens - answer.prompt_tokens == len(ids) - 4
    with pytest.raises(InvalidValue, match="max_tokens_per_doc"):
        await embeddings.rerank({"query": "q", field: texts, "max_tokens_per_doc": -5}, model())
