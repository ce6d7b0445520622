"""Custom model code: it runs if it is trusted, and is rejected if the aligned cache would make it wrong."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import tiny
from tests.worker.loaded import GREEDY, complete_one, edit, generated, load, serving
from worker.engines.transformers.engine import TransformersEngine
from worker.errors import StartError
from worker.estimate.estimate import estimate
from worker.protocol.argv import Estimate
from worker.protocol.events import Exit

PROMPTS = [tuple(range(5, 5 + length)) for length in (3, 40, 11)]
CONFIG = """
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "odd"
"""
RIGHT = """

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""
COUNTS_FROM_THE_LEFT = """

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **options):
        first = past_key_values.get_seq_length() % 3 if past_key_values is not None else 0
        return super().forward(
            input_ids, attention_mask=attention_mask, position_ids=position_ids + first,
            past_key_values=past_key_values, **options
        )
"""
KEEPS_ITS_OWN = """

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, input_ids, attention_mask=None, **options):
        return super().forward(input_ids, use_cache=False)
"""


OF_ANOTHER_TIME = """

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, input_ids, past_key_values=None, **options):
        return super().forward(input_ids, past_key_values=past_key_values[0][0].old_names, **options)
"""
NEVER_BUILT = """

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        self.what = config.is_no_longer_there
"""
NEVER_READ = """
from transformers import GoneWithVersionFive
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder to which transformers copies custom code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


def snapshot(folder: Path, code: str) -> Path:
    """A Llama whose code is in its snapshot, under a model type unknown to transformers."""
    tiny.make("llama", folder)
    (folder / "modeling_odd.py").write_text(CONFIG + code)
    edit(
        folder / "config.json",
        model_type="odd",
        architectures=["OddForCausalLM"],
        auto_map={"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"},
    )
    return folder


async def test_code_of_a_snapshot_is_batched_where_it_is_trusted(tmp_path: Path, modules: None) -> None:
    folder = snapshot(tmp_path / "right", RIGHT)
    model = transformers.LlamaForCausalLM.from_pretrained(tiny.make("llama", tmp_path / "plain"))
    async with serving(load(folder, trust_remote_code=True)) as engine:
        collected = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=36) for prompt in PROMPTS))
    assert [each.tokens for each in collected] == [generated(model, prompt, 36) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("code", "why"),
    [(COUNTS_FROM_THE_LEFT, "gives other text"), (KEEPS_ITS_OWN, "takes no cache")],
    ids=["wrong", "none"],
)
def test_models_that_the_aligned_cache_gets_wrong_are_rejected(
    code: str, why: str, tmp_path: Path, modules: None
) -> None:
    with pytest.raises(StartError, match=why) as error:
        load(snapshot(tmp_path / "odd", code), trust_remote_code=True)
    assert error.value.exit is Exit.UNUSABLE
    assert "'odd'" in str(error.value)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (OF_ANOTHER_TIME, "its model"),
        (NEVER_BUILT, "AttributeError: 'OddConfig' object has no attribute 'is_no_longer_there'"),
        (NEVER_READ, "ImportError: cannot import name 'GoneWithVersionFive'"),
    ],
    ids=["forward", "init", "import"],
)
def test_code_that_does_not_run_any_more_is_refused_and_not_tried_again(
    code: str, why: str, tmp_path: Path, modules: None
) -> None:
    with pytest.raises(StartError, match="own code") as error:
        load(snapshot(tmp_path / "odd", code), trust_remote_code=True)
    assert error.value.exit is Exit.UNUSABLE
    assert f"does not run with transformers {transformers.__version__}" in str(error.value)
    assert why in str(error.value)


def test_the_error_for_a_failing_tokenizer_names_its_folder(tmp_path: Path, modules: None) -> None:
    folder = tiny.make("llama", tmp_path / "odd")
    (folder / "tokenization_odd.py").write_text(
        "from transformers import PreTrainedTokenizer\n\n\nclass OddTokenizer(PreTrainedTokenizer):\n"
        "    def __init__(self, **settings):\n        self.sp_tokenizer.begin()\n"
    )
    auto_map = {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}
    edit(folder / "tokenizer_config.json", tokenizer_class="OddTokenizer", auto_map=auto_map)
    with pytest.raises(StartError, match="has no tokenizer that can be loaded: AttributeError") as error:
        load(folder, trust_remote_code=True)
    assert str(folder) in str(error.value)


async def test_an_architecture_of_transformers_that_no_test_of_ours_covers_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tiny.make("llama", folder)
    small: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.HeliumConfig(
        **small, num_key_value_heads=2, head_dim=16, vocab_size=512, max_position_embeddings=256, eos_token_id=1
    )
    model: Any = transformers.HeliumForCausalLM(config)
    model.eval().save_pretrained(folder)
    engine: TransformersEngine
    async with serving(load(folder)) as engine:
        collected = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=12) for prompt in PROMPTS))
    assert [each.tokens for each in collected] == [generated(model, prompt, 12) for prompt in PROMPTS]


def test_an_architecture_of_transformers_that_takes_no_cache_but_its_own_is_refused(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "m")
    small: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MiniMaxConfig(
        **small, num_key_value_heads=2, head_dim=16, vocab_size=512, num_local_experts=2, num_experts_per_tok=1
    )
    transformers.MiniMaxForCausalLM(config).save_pretrained(folder)
    with pytest.raises(StartError, match=r"architecture 'minimax' does not run here .*cache of its own") as error:
        load(folder)
    assert error.value.exit is Exit.UNUSABLE


def test_positions_that_do_not_begin_at_0_are_found(tmp_path: Path) -> None:
    """Kosmos-2.5 counts them from the padding token's id + 1. A reference with positions of ours would hide it."""
    folder = tiny.make("llama", tmp_path / "m")
    text: Any = {"embed_dim": 32, "ffn_dim": 64, "layers": 1, "attention_heads": 2, "vocab_size": 512, "init_std": 0.5}
    vision: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Kosmos2_5Config(text_config=text, vision_config=vision)
    transformers.Kosmos2_5ForConditionalGeneration(config).save_pretrained(folder)
    with pytest.raises(StartError, match=r"architecture 'kosmos-2.5' cannot be served .* self-check failed"):
        load(folder)


def test_an_encoder_decoder_whose_decoder_has_no_configuration_is_refused_by_load_and_estimate(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "m")
    sides: Any = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads: Any = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128}
    config = transformers.FSMTConfig(src_vocab_size=512, tgt_vocab_size=512, d_model=32, init_std=0.5, **sides, **heads)
    transformers.FSMTForConditionalGeneration(config).save_pretrained(folder)
    for run in (lambda: load(folder), lambda: estimate(Estimate(snapshot=str(folder)))):
        with pytest.raises(StartError, match=r"'fsmt' cannot be served .* its decoder has no configuration") as error:
            run()
        assert error.value.exit is Exit.UNUSABLE


@pytest.mark.parametrize("family", ["mamba", "jamba"])
async def test_a_prompt_in_chunks_gives_the_logprobs_of_the_whole_one_in_16_bits(family: str, tmp_path: Path) -> None:
    """The code of these families forgets its states when it gets several tokens behind them."""
    folder, found = tiny.make(family, tmp_path), []
    for chunk in (16, 64):
        async with serving(load(folder, dtype="float16", prefill_chunk=chunk, ctx_size=64)) as engine:
            answer = await complete_one(engine, range(5, 25), max_tokens=1, sampling=replace(GREEDY, logprobs=3))
            found.append({each.token: each.logprob for each in answer.logprobs[0].top})
    assert found[0] == pytest.approx(found[1], abs=0.02)
