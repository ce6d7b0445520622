"""Embeddings and scores: correct pooling, independence of other texts in the batch, clear limits."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests import tiny
from tests.pickled import poison
from tests.worker.loaded import complete_one, load, serving
from worker import errors
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import sentence_transformers_config
from worker.engines.transformers.load.sentence_transformers_config import Dense, EmbedderConfig, Pooling
from worker.engines.transformers.load_encoder import warm_up
from worker.engines.transformers.run.pooling import PoolingHead, activation, normalized, pool
from worker.interface import EncoderInput

TOKENS = [tuple(range(3, 3 + length)) for length in (4, 31, 1, 9, 60, 5, 12)]
PROMPTS = [EncoderInput(tokens) for tokens in TOKENS]


@pytest.fixture(scope="module", params=["bert-embed", "llama-embed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(request.param, tmp_path_factory.mktemp("embed"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = load(folder, parallel=3, prefill_chunk=64)
    yield engine
    asyncio.run(engine.close())


def hidden(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Last hidden states `[tokens, width]` of a plain forward."""
    model: Any = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def unit(vector: torch.Tensor) -> list[float]:
    numbers: list[float] = (vector / vector.norm()).tolist()
    return numbers


async def test_vectors_are_the_mean_of_a_plain_forward_in_any_batch(engine: TransformersEngine, folder: Path) -> None:
    assert engine.capabilities == {"embedding", "rerank"}
    together = await engine.embed(PROMPTS)
    split = await asyncio.gather(*(engine.embed([prompt]) for prompt in PROMPTS))
    for prompt, vector, (alone,) in zip(PROMPTS, together, split, strict=True):
        exact = unit(hidden(folder, prompt.tokens).mean(0))
        assert vector == pytest.approx(exact, abs=1e-5)
        assert alone == pytest.approx(exact, abs=1e-5)


async def test_a_text_model_embeds_with_task_embed(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    async with serving(load(folder, task="embed")) as engine:
        (vector,) = await engine.embed(PROMPTS[:1])
    assert vector == pytest.approx(unit(hidden(folder, TOKENS[0]).mean(0)), abs=1e-5)


@pytest.mark.parametrize("name", ["T5EncoderModel", "T5ForConditionalGeneration"])
async def test_t5_embeds_with_its_encoder_whether_the_decoder_is_there_or_not(name: str, tmp_path: Path) -> None:
    folder = tiny.make("t5", tmp_path)
    getattr(transformers, name).from_pretrained(folder).save_pretrained(folder)
    async with serving(load(folder, task="embed")) as engine:
        (vector,) = await engine.embed(PROMPTS[:1])
    model = transformers.T5EncoderModel.from_pretrained(folder)
    with torch.inference_mode():
        states = model(torch.tensor([TOKENS[0]])).last_hidden_state[0]
    assert vector == pytest.approx(unit(states.mean(0)), abs=1e-5)


def test_a_reranker_that_answers_in_words_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """As Qwen3-Reranker, which says yes or no."""
    with pytest.raises(
        errors.StartError, match=r"names LlamaForCausalLM; take a conversion .* for sequence classification"
    ):
        load(tiny.make("llama", tmp_path), task="rerank")


def test_an_architecture_without_hidden_states_is_refused(tmp_path: Path) -> None:
    config = transformers.DPRConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    transformers.DPRQuestionEncoder(config).save_pretrained(tmp_path)
    tiny.make_tokenizer("bert-embed").save_pretrained(tmp_path)
    with pytest.raises(errors.StartError, match="'dpr' cannot be served"):
        load(tmp_path)


async def test_invalid_texts_are_rejected(engine: TransformersEngine) -> None:
    with pytest.raises(errors.ContextExceeded):
        await engine.embed([PROMPTS[0], EncoderInput((5,) * 257)])
    with pytest.raises(errors.InvalidValue, match="vocabulary"):
        await engine.embed([EncoderInput((5, 9999))])
    with pytest.raises(errors.InvalidValue, match="empty"):
        await engine.embed([EncoderInput(())])
    with pytest.raises(errors.UnsupportedByModel):
        await complete_one(engine, TOKENS[0])
    assert await engine.embed([]) == []
    assert len((await engine.embed([EncoderInput((5,) * 256)]))[0]) == 64, "the longest input fits"


async def test_the_queue_of_embeddings_is_bounded_and_ends_with_the_engine(folder: Path) -> None:
    engine = load(folder, parallel=1, queue_size=1, prefill_chunk=8)
    running = [asyncio.create_task(engine.embed([PROMPTS[4]] * 500)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(errors.QueueFull):
        await engine.embed(PROMPTS[:1])
    await engine.close()
    for each in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(each, errors.Draining)


def test_pooling_looks_at_tokens_only() -> None:
    states = torch.arange(24, dtype=torch.float32).view(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    none, one = torch.tensor([0, 0]), torch.tensor([1, 1])
    expected = {
        "mean": [1.5, 2.5, 3.5],
        "max": [3.0, 4.0, 5.0],
        "cls": [0.0, 1.0, 2.0],
        "last": [3.0, 4.0, 5.0],
        "weightedmean": [2.0, 3.0, 4.0],
        "mean_sqrt_len_tokens": [3 / 2**0.5, 5 / 2**0.5, 7 / 2**0.5],
    }
    assert set(expected) == set(sentence_transformers_config.MODES)
    for mode, vector in expected.items():
        assert pool(states, mask, mode, none)[0].tolist() == pytest.approx(vector), mode
        assert pool(states, mask, mode, one)[0].tolist() == pytest.approx([3.0, 4.0, 5.0]), "one token is left"
    assert pool(states, mask, "last", none).tolist()[1] == [21.0, 22.0, 23.0]


@pytest.mark.parametrize(
    ("norm", "expected"), [(-1, [3.0, -4.0]), (0, [24570.0, -32760.0]), (1, [3 / 7, -4 / 7]), (2, [0.6, -0.8])]
)
def test_vectors_are_normalised_as_asked(norm: int, expected: list[float]) -> None:
    assert normalized(torch.tensor([[3.0, -4.0]]), norm)[0].tolist() == pytest.approx(expected)
    assert not normalized(torch.zeros(1, 2), norm).isnan().any()


async def test_a_text_that_the_model_fails_on_ends_its_request_alone(tmp_path: Path) -> None:
    folder = tiny.make("llama-embed", tmp_path)
    async with serving(load(folder)) as engine:
        work = engine._encoder
        assert work is not None
        real = work._encoder

        class Fragile:
            """Fails on one token, and returns NaN for another."""

            def run(self, texts: Sequence[EncoderInput]) -> list[torch.Tensor]:
                if any(7 in text.tokens for text in texts):
                    raise ValueError("a secret of the text")
                found = real.run(texts)
                return [vector / 0 if 9 in text.tokens else vector for text, vector in zip(texts, found, strict=True)]

        work._encoder = Fragile()
        good, bad, endless = EncoderInput((3, 4)), EncoderInput((7, 3)), EncoderInput((9, 3))
        collected = await asyncio.gather(
            engine.embed([good, good]), engine.embed([good, bad]), engine.embed([endless, good]), return_exceptions=True
        )
        assert isinstance(collected[0], list)
        assert isinstance(collected[1], errors.SequenceFailed)
        assert "secret" not in str(collected[1])
        assert isinstance(collected[2], errors.SequenceFailed)
        assert (await engine.embed([good]))[0] == pytest.approx(collected[0][0], abs=1e-6)
        assert engine.occupancy.waiting == 0


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
# Settings of small models of the architectures that read padding.
READERS: dict[str, dict[str, Any]] = {
    "convbert": {"embedding_size": 64},
    "fnet": {"use_tpu_fourier_optimizations": False},
    "mobilebert": {"embedding_size": 64, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "yoso": {"use_expectation": True},
}


@pytest.mark.parametrize("kind", READERS)
async def test_a_text_of_an_architecture_that_reads_padding_is_computed_alone(kind: str, tmp_path: Path) -> None:
    members: dict[str, Any] = {**SMALL, **READERS[kind], "max_position_embeddings": 256}
    config = transformers.CONFIG_MAPPING[kind](**members)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModel
    model = auto.from_config(config)
    tiny.spread(model, 8.0)
    model.save_pretrained(tmp_path)
    tiny.make_tokenizer("bert-embed").save_pretrained(tmp_path)
    async with serving(load(tmp_path, pooling="mean", task="embed")) as engine:
        together = await engine.embed(PROMPTS)
    for prompt, vector in zip(PROMPTS, together, strict=True):
        mean = hidden(tmp_path, prompt.tokens).mean(0)
        assert torch.tensor(vector) / torch.tensor(vector).norm() == pytest.approx(mean / mean.norm(), abs=1e-5)


def test_an_architecture_that_mixes_padding_into_texts_of_some_lengths_is_refused() -> None:
    class Mixing:
        """Scores a text of 6 tokens otherwise in a batch."""

        def run(self, texts: Sequence[EncoderInput]) -> list[torch.Tensor]:
            return [torch.tensor([1.02 if len(texts) > 1 and len(text.tokens) == 6 else 1.0]) for text in texts]

    with pytest.raises(errors.StartError, match="'mixing' cannot be served: a text gives other numbers in a batch"):
        warm_up(Mixing(), kind="mixing", ctx_size=256, vocab_size=512, tolerance=0.01)


def test_an_architecture_that_fails_on_short_texts_is_refused(tmp_path: Path) -> None:
    config = transformers.FunnelConfig(
        vocab_size=512, block_sizes=[1, 1, 1], d_model=32, n_head=4, d_head=8, d_inner=64, num_decoder_layers=1
    )
    transformers.FunnelModel(config).save_pretrained(tmp_path)
    tiny.make_tokenizer("bert-embed").save_pretrained(tmp_path)
    with pytest.raises(errors.StartError, match="'funnel' cannot be served"):
        load(tmp_path, ctx_size=64)


async def test_a_short_request_is_not_held_up_by_one_of_a_thousand_texts_which_can_be_cancelled(
    engine: TransformersEngine,
) -> None:
    many = asyncio.create_task(engine.embed([PROMPTS[4]] * 1000))
    await asyncio.sleep(0)
    await engine.embed([PROMPTS[0], PROMPTS[4]])
    assert not many.done()
    many.cancel()
    with pytest.raises(asyncio.CancelledError):
        await many
    assert len(await engine.embed(PROMPTS[:1])) == 1
    assert engine.occupancy.waiting == 0


def test_a_pooler_in_the_files_that_no_vector_needs_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.make("bert-embed", tmp_path)
    assert "pooler.dense.weight" in safetensors.torch.load_file(folder / "model.safetensors")
    library: Any = transformers.utils.logging
    library.add_handler(caplog.handler)
    try:
        with caplog.at_level("WARNING", "transformers"):
            load(folder)
    finally:
        library.remove_handler(caplog.handler)
    assert "pooler" not in caplog.text


async def test_without_pooling_each_token_has_its_vector(tmp_path: Path) -> None:
    folder = tiny.make("bert-embed", tmp_path)
    async with serving(load(folder, pooling="none")) as engine:
        assert engine.capabilities == {"embedding"}
        found = await engine.embed_tokens(PROMPTS)
        with pytest.raises(errors.InvalidValue, match="/embedding"):
            await engine.embed(PROMPTS)
    for prompt, rows in zip(PROMPTS, found, strict=True):
        assert (torch.tensor(rows) - hidden(folder, prompt.tokens)).abs().max() < 1e-4


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def kinds(*names: str) -> list[dict[str, str]]:
    return [
        {"path": str(place) if place else "", "type": f"sentence_transformers.models.{name}"}
        for place, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"modules.json": kinds("Transformer", "Pooling", "CNN")}, "CNN"),
        ({"modules.json": kinds("Transformer")}, "no Pooling"),
        ({"modules.json": kinds("Transformer", "Pooling", "Pooling")}, "further ones"),
        ({"modules.json": [{"path": "", "type": "custom_st.Transformer"}]}, "custom_st"),
        ({"modules.json": [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]}, "0_Trans"),
        ({"modules.json": {}}, "damaged"),
        (
            {"modules.json": [*kinds("Transformer"), {"path": "../x", "type": "sentence_transformers.models.Pooling"}]},
            "'../x', which is no folder below it",
        ),
        ({"modules.json": kinds("Transformer", "Pooling"), "1/config.json": {"pooling_mode": "median"}}, "median"),
        ({"modules.json": kinds("Transformer", "Pooling", "Dense"), "2/config.json": {"in_features": 3}}, "damaged"),
        (
            {
                "modules.json": kinds("Transformer", "Pooling", "Dense"),
                "2/config.json": {"in_features": 3, "out_features": 3, "module_input_name": "token_embeddings"},
            },
            "token_embeddings",
        ),
        ({"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "fill-mask"),
        ({"sentence_bert_config.json": {"modality_config": {"message": {}, "text": {}}}}, "message"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "q"}}, "'q'"),
        ({"config_sentence_transformers.json": {"prompts": {"q": 1}}}, "prompts"),
    ],
)
def test_a_layout_that_we_cannot_apply_is_refused_by_name(files: dict[str, Any], word: str, tmp_path: Path) -> None:
    for name, value in files.items():
        write(tmp_path, name, value)
    with pytest.raises(errors.StartError, match=word):
        sentence_transformers_config.read(tmp_path)


def test_the_requested_pooling_replaces_that_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", kinds("Transformer", "Pooling", "Dropout", "Normalize"))
    write(tmp_path, "1/config.json", {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    assert sentence_transformers_config.read(tmp_path).steps == (sentence_transformers_config.Pooling(("cls", "max")),)
    assert sentence_transformers_config.read(tmp_path, "last").steps == (
        sentence_transformers_config.Pooling(("last",)),
    )
    assert sentence_transformers_config.read(tmp_path, "none").steps == ()
    with pytest.raises(errors.StartError, match="cross-encoder"):
        sentence_transformers_config.read(tmp_path, "rank")
    with pytest.raises(errors.StartError, match="median"):
        sentence_transformers_config.read(tmp_path, "median")


def test_the_longest_text_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    assert sentence_transformers_config.max_tokens(tmp_path) == 0
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 1000000000000000019884624838656})
    assert sentence_transformers_config.max_tokens(tmp_path) == 0
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    assert sentence_transformers_config.max_tokens(tmp_path) == 512
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 128})
    assert sentence_transformers_config.max_tokens(tmp_path) == 128


def test_a_pickled_layer_gives_the_vectors_of_the_same_one_in_safetensors(tmp_path: Path) -> None:
    """As in older repositories of sentence-transformers. Code in a pickle is not executed."""
    folders = [tmp_path / name for name in ("plain", "pickled", "poisoned")]
    for folder in folders:
        folder.mkdir()
    tensors = {"linear.weight": torch.randn(8, 64), "linear.bias": torch.randn(8)}
    safetensors.torch.save_file(tensors, folders[0] / "model.safetensors")
    torch.save(tensors, folders[1] / "pytorch_model.bin")
    poison(folders[2], tmp_path / "trace")
    plain, pickled, poisoned = (
        PoolingHead(EmbedderConfig(steps=(Pooling(("cls",)), Dense(folder, 64, 8)))) for folder in folders
    )
    hidden, mask = torch.randn(2, 3, 64), torch.ones(2, 3, dtype=torch.bool)
    expected, found = (torch.stack(head.load()(hidden, mask, [0, 0])) for head in (plain, pickled))
    assert torch.equal(found, expected)
    with pytest.raises(errors.StartError, match="has more than tensors"):
        poisoned.load()
    assert not (tmp_path / "trace").exists()


def test_layers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    head = PoolingHead(
        sentence_transformers_config.EmbedderConfig(
            steps=(
                sentence_transformers_config.Pooling(("cls", "mean")),
                sentence_transformers_config.Dense(tmp_path, 64, 8),
            )
        )
    )
    with pytest.raises(errors.StartError, match="expects vectors of 64 components, but gets 128"):
        head.size(64)
    assert head.size(32) == 8
    with pytest.raises(errors.StartError, match=r"no model\.safetensors"):
        head.load()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(errors.StartError, match=r"pytorch_model\.bin is damaged, or has more than tensors"):
        head.load()
    safetensors.torch.save_file({"linear.weight": torch.zeros(8, 63)}, tmp_path / "model.safetensors")
    with pytest.raises(errors.StartError, match=r"do not fit its config\.json"):
        head.load()


@pytest.mark.parametrize("path", ["os.system", "torch.nn.Linear", "torch.nn.functional.relu", "torch.load", ""])
def test_an_activation_is_a_module_of_torch_and_nothing_else(path: str, tmp_path: Path) -> None:
    with pytest.raises(errors.StartError, match=re.escape(repr(path))):
        activation(path, tmp_path)
    assert isinstance(activation("torch.nn.modules.activation.GELU", tmp_path), torch.nn.GELU)
