"""Tokenizers that are stored in other files than tokenizer.json."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from transformers.integrations.mistral import tokenizer as mistral

from tests import tiny
from worker.engines.transformers.load.snapshot import load_tokenizer
from worker.protocol.argv import Estimate


def write_sentencepiece(folder: Path) -> bytes:
    """Train a model of tiny.CORPUS and store it instead of tokenizer.json."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.CORPUS), model_writer=file, model_type="bpe", vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return file.getvalue()


@pytest.mark.parametrize(
    "text", ["The quick brown fox", "two  blanks and\ta tab\n\n", "na\u00efve \u4f60\u597d \U0001f98a", "1234"]
)
def test_a_sentencepiece_model_gives_the_tokens_of_its_library(tmp_path: Path, text: str) -> None:
    stored = write_sentencepiece(tiny.make("llama", tmp_path))
    tokenizer = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == sentencepiece.SentencePieceProcessor(model_proto=stored).encode(text)
    assert tokenizer.decode(tokens) == text


def test_mistral_common_does_not_replace_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers prefers it where it is installed, and its tokenizer has neither tokens of bytes nor a template."""
    monkeypatch.setattr(mistral, "is_mistral_common_available", lambda: True)
    folder = tiny.make("mistral", tmp_path)
    (folder / "tekken.json").write_text("{}")
    tokenizer = load_tokenizer(Estimate(snapshot=str(tmp_path)))
    assert tokenizer.decode(tokenizer.encode("the")) == "<s>the"
