"""RoPE scaling as a JSON object in the settings of vLLM and LMI."""

import pytest

from tests.router.preset_texts import complaint, one, read

YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        (YARN, {"rope-scaling": "yarn", "rope-scale": 4, "yarn-orig-ctx": 32768}),
        ('{"type": "linear", "factor": 2}', {"rope-scaling": "linear", "rope-scale": 2}),
        (
            '{"type": "yarn", "rope_type": "yarn", "factor": 2, "beta_fast": 16, "beta_slow": 2, "attn_factor": 3}',
            {"rope-scaling": "yarn", "rope-scale": 2, "yarn-beta-fast": 16, "yarn-beta-slow": 2, "yarn-attn-factor": 3},
        ),
        ('{"rope_type": "default", "rope_theta": 5e5}', {"rope-scaling": "none", "rope-freq-base": 5e5}),
        ("{}", {}),
    ],
)
def test_an_object_means_the_keys_for_scaling(given: str, rope: dict[str, object]) -> None:
    assert one(f"rope_scaling = {given}").rope == rope
    assert one("", environ={"OPTION_ROPE_SCALING": given}).rope == rope
    assert one("", flags={"rope-scaling": given}).rope == rope


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            '{"type": "dynamic", "factor": 2}',
            'no key means the kind "dynamic"; write config-override = {"rope_scaling"',
        ),
        ('{"type": "yarn", "factor": 2, "mscale": 1}', 'no key means the member "mscale"; write config-override ='),
        ('{"factor": 2}', "the object must have one rope_type; write rope-scaling and rope-scale in its place"),
        ('{"type": "yarn", "rope_type": "linear", "factor": 2}', "the object must have one rope_type"),
        ('{"type": "yarn"}', "the object has no factor; add it"),
        ('{"type": "linear", "factor": true}', "factor must be a number"),
        ('{"type": "linear", "factor": 1e999}', r'"{\"type\": \"linear\", \"factor\": 1e999}" is not JSON'),
        ('{"type"', '"{\\"type\\"" is not JSON'),
    ],
)
def test_an_object_without_keys_of_its_meaning_is_refused_with_the_remedy(given: str, message: str) -> None:
    assert f"rope_scaling: {message}" in complaint(f"rope_scaling = {given}")


def test_an_object_replaces_all_keys_for_scaling_of_weaker_places() -> None:
    star = "[*]\nrope-scaling = yarn\nrope-freq-scale = 0.25\nyarn-beta-fast = 16\nyarn-ext-factor = 1\n"
    loaded = read(star + '[m]\nmodel = demo:a\nrope_scaling = {"type": "linear", "factor": 2}')
    assert (loaded.problems, loaded.warnings) == ((), ())
    assert loaded.presets["m"].rope == {"rope-scaling": "linear", "rope-scale": 2}


def test_vllms_names_of_rope_keys_are_spellings() -> None:
    assert one("", flags={"rope-theta": "500000"}).rope == {"rope-freq-base": 500000}
    given = '{"rope_scaling":{"factor":2,"type":"dynamic"}}'
    assert one("", flags={"hf-overrides": given}).config_override == given
