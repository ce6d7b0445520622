"""RoPE keys and config-override in the model. The oracle is transformers with a config written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from router.memory import checkpoint
from tests import tiny
from tests.worker.loaded import complete_one, generated, load, options, serving
from worker.engines.transformers.load import architectures
from worker.engines.transformers.load.snapshot import load_config
from worker.errors import StartError

PROMPT = tuple(range(20, 80))
THETA = 10000.0


@pytest.fixture(scope="module", params=["rope_parameters", "rope_theta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot as transformers 5 writes it, or with the names of earlier versions."""
    made = tiny.make("llama", tmp_path_factory.mktemp("llama"))
    if request.param == "rope_theta":
        config = json.loads((made / "config.json").read_text())
        assert config.pop("rope_parameters") == {"rope_theta": THETA, "rope_type": "default"}
        (made / "config.json").write_text(json.dumps({**config, "rope_theta": THETA, "rope_scaling": None}))
    return made


def by_hand(folder: Path, prompt: Sequence[int], **members: Any) -> list[int]:
    """The text of the model with these members of its config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in members.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
    return generated(model, prompt, 24)


async def text(folder: Path, **changes: Any) -> list[int]:
    async with serving(load(folder, **changes)) as engine:
        return (await complete_one(engine, PROMPT, max_tokens=24)).tokens


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ({"rope-scale": 4.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}),
        ({"rope-freq-base": 300.0}, {"rope_type": "default", "rope_theta": 300.0}),
        # heads of 16 rotated dimensions
        ({"alpha-value": 8.0}, {"rope_type": "default", "rope_theta": THETA * 8.0 ** (16 / 14)}),
        ({"rope-scaling": "yarn", "rope-scale": 4.0, "yarn-orig-ctx": 32},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": THETA}),
        ({"rope-scaling": "yarn", "rope-scale": 8.0, "yarn-orig-ctx": 32, "yarn-beta-fast": 2.0,
          "yarn-attn-factor": 2.0},
         {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": THETA,
          "beta_fast": 2.0, "attention_factor": 2.0 * 1.2079441541679836}),
    ],
)  # fmt: skip
async def test_keys_give_the_text_of_a_config_written_by_hand(
    folder: Path, keys: dict[str, Any], parameters: dict[str, Any]
) -> None:
    expected = by_hand(folder, PROMPT, rope_parameters=parameters)
    assert expected != by_hand(folder, PROMPT), "or else this shows nothing"
    assert await text(folder, rope=json.dumps(keys)) == expected


def test_router_and_worker_grow_the_context_alike(folder: Path) -> None:
    for keys, longest in (
        ({"rope-scale": 4.0}, 1024),
        ({"alpha-value": 2.0}, 512),
        ({"rope-scaling": "yarn", "rope-scale": 8.0, "yarn-orig-ctx": 64}, 512),
        ({"rope-scaling": "none"}, 256),
    ):
        assert checkpoint.read(folder, rope=keys).max_positions == longest
        assert architectures.positions(load_config(options(folder, rope=json.dumps(keys)))) == longest


@pytest.mark.parametrize(
    "scaling",
    [{"rope": '{"rope-scale": 4.0}'}, {"config_override": '{"rope_scaling": {"type": "linear", "factor": 4.0}}'}],
)
async def test_a_context_beyond_that_of_the_training_can_be_used(folder: Path, scaling: dict[str, Any]) -> None:
    async with serving(load(folder, **scaling, ctx_size=600)) as engine:
        assert engine.ctx_size == 600
        answer = await complete_one(engine, PROMPT * 8, max_tokens=24)
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}
    assert answer.tokens == by_hand(folder, PROMPT * 8, rope_parameters=scaled)


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(StartError) as error:
        load_config(options(folder, **changes))
    return str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mamba", "gptj"])
def test_a_family_without_rope_refuses_keys_by_name(family: str, tmp_path: Path) -> None:
    made = tiny.make(family, tmp_path / family)
    message = f"rope-scale: architecture {family!r} has no RoPE that can be changed; remove it"
    assert refused(made, rope='{"rope-scale": 2.0}') == message
    load_config(options(made, rope='{"rope-scaling": "none"}'))


def frequencies(config: Any) -> dict[str, list[float]]:
    """The rotations per position of a head's pairs of dimensions, by buffer of the model that transformers builds."""
    models: Any = transformers.AutoModel  # untyped
    buffers = models.from_config(config).named_buffers()
    return {name: each.tolist() for name, each in buffers if name.endswith("inv_freq") and "original" not in name}


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "phi", "falcon", "deepseek_v3", "gemma3_text", "olmo3"])
def test_all_families_with_rope_take_keys(family: str, tmp_path: Path) -> None:
    made = tiny.make(family, tmp_path / family)
    before = load_config(options(made))
    for keys, first, last in (({"alpha-value": 2.0}, 1.0, 2.0), ({"rope-scale": 4.0}, 4.0, 4.0)):
        after = load_config(options(made, rope=json.dumps(keys)))
        assert architectures.positions(after) == last * architectures.positions(before)
        assert checkpoint.read(made, rope=keys).max_positions == last * checkpoint.read(made).max_positions
        was, now = frequencies(before), frequencies(after)
        assert was
        for name in was:
            slower = (1.0, 1.0) if "sliding" in name else (first, last)
            found = was[name][0] / now[name][0], was[name][-1] / now[name][-1]
            assert found == pytest.approx(slower, rel=1e-5), name


def test_a_family_that_lacks_a_kind_of_scaling_refuses_it_by_name(tmp_path: Path) -> None:
    made = tiny.make("phi3", tmp_path / "phi3")
    assert refused(made, rope='{"rope-scale": 2.0}').startswith("rope-scale: architecture 'phi3' does not take it: ")
    load_config(options(made, rope='{"alpha-value": 2.0}'))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rope_scalling": {}}, 'LlamaConfig has no member "rope_scalling"; did you mean "rope_scaling"?'),
        ({"foo": 1}, 'LlamaConfig has no member "foo"'),
        ({"num_hidden_layer": 1}, 'did you mean "num_hidden_layers"?'),
        ({"rope_parameters": {"rope_thetta": 5.0}}, 'rope_parameters has no "rope_thetta"; did you mean "rope_theta"?'),
        ({"rope_scaling": {"type": "lineer", "factor": 2.0}}, 'rope_scaling has no "lineer"; did you mean "linear"?'),
        ({"rope_parameters": {"full_attention": {"foo": 1}}}, 'rope_parameters.full_attention has no "foo"'),
    ],
)
def test_an_override_of_an_unknown_member_names_the_nearest(
    folder: Path, override: dict[str, Any], message: str
) -> None:
    assert message in refused(folder, config_override=json.dumps(override))


def test_an_override_of_rope_is_unknown_to_a_family_without_it(tmp_path: Path) -> None:
    assert 'GPT2Config has no member "rope_theta"' in refused(
        tiny.make("gpt2", tmp_path / "gpt2"), config_override='{"rope_theta": 5.0}'
    )


def test_an_override_of_rope_may_leave_its_kind_open(folder: Path) -> None:
    override = '{"rope_parameters": {"rope_type": null, "rope_theta": 7.0}}'
    assert load_config(options(folder, config_override=override)).rope_parameters["rope_theta"] == 7.0


def test_an_override_of_rope_by_kind_of_layers_needs_no_kinds_in_config_json(tmp_path: Path) -> None:
    made = tiny.make("gemma3_text", tmp_path / "gemma3_text")
    stored = json.loads((made / "config.json").read_text())
    wanted = stored.pop("rope_parameters") | {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
    del stored["layer_types"]
    (made / "config.json").write_text(json.dumps(stored))
    config = load_config(options(made, config_override=json.dumps({"rope_parameters": wanted})))
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 7.0


def test_members_of_config_json_and_of_nested_configs_are_known(folder: Path, tmp_path: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    load_config(options(folder, config_override=json.dumps(stored)))
    config = transformers.Gemma3Config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    load_config(options(tmp_path, config_override='{"text_config": {"sliding_window": 4096, "rope_theta": 5.0}}'))
    message = refused(tmp_path, config_override='{"text_config": {"sliding_windo": 4096}}')
    assert message.endswith('no member "text_config.sliding_windo"; did you mean "text_config.sliding_window"?')
    message = refused(tmp_path, config_override='{"sliding_window": 4096}')
    assert message.endswith('no member "sliding_window"; write it into "text_config"')


def test_members_of_rope_that_only_one_architecture_reads_are_known_to_it(folder: Path, tmp_path: Path) -> None:
    override = '{"rope_parameters": {"short_mscale": 1.0}}'
    load_config(options(tiny.make("phimoe", tmp_path / "m"), config_override=override))
    assert 'rope_parameters has no "short_mscale"' in refused(folder, config_override=override)
