"""Greedy text about images equals transformers' own `generate` with the same processor's inputs, token for token.

Alone, in prompts cut into chunks anywhere, and in a batch with requests that have no images.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import transformers

from tests import tiny_vision
from tests.worker.loaded import DEADLINE, GREEDY, collect_choices, complete_one, generated, load, serving
from worker.engines.transformers.engine import TransformersEngine
from worker.images import EncodedImage
from worker.interface import GenerationRequest
from worker.protocol.architectures import VISION

NEW = 24
PROMPTS = {
    "one image": ("<s>Look at PLACE and say what it shows.", 1),
    "an image at the end": ("<s>What is this? PLACE", 1),
    "two images side by side": ("<s>PLACEPLACE Which of them is larger, and why?", 2),
    "three images among words": ("<s>The first PLACE is red, the second PLACE is not; the third PLACE may be.", 3),
}
PICTURES = [
    tiny_vision.picture(40, 30, seed=1),
    tiny_vision.picture(20, 90, seed=2),
    tiny_vision.picture(64, 64, seed=3),
]


@dataclass
class Reference:
    """transformers' own model and processor."""

    model: Any
    processor: Any
    place: str

    def answer(self, prompt: str, prompt_images: list[PIL.Image.Image]) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, and the result of `generate`."""
        inputs = self.processor(
            images=prompt_images,
            text=[prompt.replace("PLACE", self.place)],
            return_tensors="pt",
            add_special_tokens=False,
        )
        tokens = inputs["input_ids"][0].tolist()
        out = self.model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        answer: list[int] = out[0, len(tokens) :].tolist()
        ends = self.model.generation_config.eos_token_id
        return tokens, answer[:-1] if answer and answer[-1] == ends else answer


@pytest.fixture(scope="module", params=sorted(VISION))
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.make(request.param, tmp_path_factory.mktemp("snapshot"))


@pytest.fixture(scope="module")
def reference(snapshot: Path) -> Reference:
    auto: Any = transformers.AutoModelForImageTextToText
    processors: Any = transformers.AutoProcessor
    processor = processors.from_pretrained(snapshot, backend="pil")
    return Reference(auto.from_pretrained(snapshot), processor, processor.image_token)


@pytest.fixture(scope="module")
def engine(snapshot: Path) -> Iterator[TransformersEngine]:
    engine = load(snapshot, ctx_size=400, parallel=3, prefill_chunk=11)
    yield engine
    asyncio.run(engine.close())


async def request(
    engine: TransformersEngine, prompt: str, prompt_images: list[PIL.Image.Image], **changes: Any
) -> GenerationRequest:
    """An image as the APIs make it."""
    assert engine.vision is not None
    images = [EncodedImage(f"image {index}", tiny_vision.encoded(each)) for index, each in enumerate(prompt_images)]
    tokens, seen = await engine.vision.read(prompt.replace("PLACE", engine.vision.placeholder), images)
    return GenerationRequest(
        id="test", prompt=tuple(tokens), prompt_images=seen, sampling=GREEDY, **{"max_tokens": NEW, **changes}
    )


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_an_answer_about_images_equals_generate(
    engine: TransformersEngine, reference: Reference, prompt: str
) -> None:
    text, count = PROMPTS[prompt]
    tokens, answer = reference.answer(text, PICTURES[:count])
    asked = await request(engine, text, PICTURES[:count])
    assert list(asked.prompt) == tokens, "the processor's own tokens"
    [collected] = await collect_choices(engine, asked)
    assert collected.tokens == answer
    assert len(set(answer)) > 3, "the text is no repetition of a few tokens"


async def test_the_last_token_of_a_prompt_may_stand_for_an_image(snapshot: Path, reference: Reference) -> None:
    """It is computed alone, as a decoded token is, which never stands for an image."""
    text, count = PROMPTS["an image at the end"]
    tokens, answer = reference.answer(text, PICTURES[:count])
    chunk = next(size for size in range(11, len(tokens)) if (len(tokens) - 1) % size == 0)
    async with serving(load(snapshot, ctx_size=400, parallel=1, prefill_chunk=chunk)) as engine:
        [collected] = await collect_choices(engine, await request(engine, text, PICTURES[:count]))
        assert collected.tokens == answer


@pytest.mark.slow
async def test_other_requests_do_not_change_the_features_of_images(
    engine: TransformersEngine, reference: Reference
) -> None:
    texts = list(PROMPTS.values())
    wanted = [reference.answer(text, PICTURES[:count])[1] for text, count in texts]
    plain = [tuple(range(3, 3 + length)) for length in (4, 30, 61)]
    language = [generated(reference.model, prompt, NEW) for prompt in plain]
    async with asyncio.timeout(DEADLINE):
        asked = [await request(engine, text, PICTURES[:count]) for text, count in texts]
        collected, answers = await asyncio.gather(
            asyncio.gather(*(collect_choices(engine, each) for each in asked)),
            asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in plain)),
        )
    assert [each.tokens for [each] in collected] == wanted
    assert [each.tokens for each in answers] == language


async def test_choices_share_the_images_of_their_prompt(engine: TransformersEngine, reference: Reference) -> None:
    text, count = PROMPTS["two images side by side"]
    _, answer = reference.answer(text, PICTURES[:count])
    collected = await collect_choices(engine, await request(engine, text, PICTURES[:count], n=4))
    assert [each.tokens for each in collected] == [answer] * 4
