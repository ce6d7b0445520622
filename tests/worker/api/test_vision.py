"""Images in every dialect, by official clients, over a real engine with random weights; rejection of invalid images."""

import asyncio
import base64
import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.checkpoint import offered
from tests import tiny_vision
from tests.tiny_vision import data_url, encoded, picture
from tests.worker import serving as workers
from tests.worker.clients import anthropic_client, ollama_client, openai_client
from tests.worker.loaded import load, options
from tests.worker.serving import Serving
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load.snapshot import load_config, load_tokenizer
from worker.engines.transformers.run import vision
from worker.errors import InvalidValue, QueueFull
from worker.images import MAX_PIXELS, MAX_REQUEST_BYTES, MAX_REQUEST_PIXELS, EncodedImage, check_images
from worker.server.server import Server

WORDS = "What does it show?"
IMAGE = picture(seed=1)
MOST = 16  # maximum tokens of an answer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    folder = tiny_vision.make("llava", tmp_path_factory.mktemp("snapshot"))
    engine = load(folder, ctx_size=300, parallel=3, prefill_chunk=32, limit_images=2)
    yield engine
    asyncio.run(engine.close())


def serving(engine: TransformersEngine) -> AbstractAsyncContextManager[Serving]:
    return workers.serving(engine, token=None, bearer=None, sampling='{"temp": 0}')


async def chat(world: Serving, *parts: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": MOST}
    status, _, answer = await world.post("/v1/chat/completions", body)
    return status, answer


async def say(world: Serving, *parts: Any) -> str:
    """Return the text of the answer."""
    status, answer = await chat(world, *parts)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


async def refused(world: Serving, *parts: Any) -> Any:
    """Return the error of the answer."""
    status, answer = await chat(world, *parts)
    assert status == 400, answer
    return answer["error"]


def shown(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(image, form, **options)}}


def said(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT: Any = {"type": "text", "text": WORDS}


async def test_memory_is_announced_before_an_image_is_read_and_before_its_step(engine: TransformersEngine) -> None:
    announced: list[str] = []
    work, reader = engine._generation, engine.vision
    assert work is not None
    assert reader is not None

    @contextmanager
    def reading() -> Iterator[None]:
        announced.append("reading")
        yield

    reader.announced, work._on_larger_step = reading, lambda: announced.append("step")
    try:
        async with serving(engine) as world:
            for seed in (5, 6):
                await say(world, shown(picture(seed=seed)), TEXT)
                await say(world, TEXT)
            announced.clear()
            await say(world, TEXT)
            assert announced == []
            await say(world, shown(picture(seed=7)), TEXT)
            assert announced[:2] == ["reading", "step"]
    finally:
        reader.announced, work._on_larger_step = nullcontext, None


@pytest.mark.slow
async def test_every_dialect_gives_the_same_answer_about_an_image(engine: TransformersEngine) -> None:
    url = data_url(IMAGE)
    async with serving(engine) as world:
        text = await say(world, shown(IMAGE), TEXT)
        assert text != await say(world, TEXT)
        async with openai_client(world) as client:
            message: Any = {"role": "user", "content": [shown(IMAGE), TEXT]}
            asked: Any = {"model": "tiny", "messages": [message], "max_tokens": MOST}
            chat = await client.chat.completions.create(**asked)
            assert chat.choices[0].message.content == text
            assert chat.usage is not None
            streamed = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
            item: Any = {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                    {"type": "input_text", "text": WORDS},
                ],
            }
            response = await client.responses.create(model="tiny", input=[item], max_output_tokens=MOST)
            assert response.output_text == text
            counted = await client.responses.input_tokens.count(model="tiny", input=[item])
            assert counted.input_tokens == chat.usage.prompt_tokens
        async with anthropic_client(world) as claude:
            source: Any = {"type": "base64", "media_type": "image/png", "data": encoded(IMAGE)}
            block: Any = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
            answer: Any = await claude.messages.create(model="tiny", max_tokens=MOST, messages=[block])
            assert answer.content[0].text == text
            assert answer.usage.input_tokens == chat.usage.prompt_tokens
            tokens = await claude.messages.count_tokens(model="tiny", messages=[block])
            assert tokens.input_tokens == chat.usage.prompt_tokens
        async with ollama_client(world) as llama:
            settings = {"num_predict": MOST}
            asking: Any = [{"role": "user", "content": WORDS, "images": [encoded(IMAGE)]}]
            assert (await llama.chat("tiny", asking, options=settings)).message.content == text
            made = await llama.generate("tiny", WORDS, images=[encoded(IMAGE)], options=settings)
            assert made.response == text


async def test_images_of_tool_results_follow_the_results(engine: TransformersEngine) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(IMAGE)}
    image, url = {"type": "image", "source": source}, data_url(IMAGE)

    def returned(*parts: Any) -> list[Any]:
        calls = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in "ab"]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": id, "content": "seen"} for id in "ab"]
        results[0]["content"] = [{"type": "text", "text": "seen"}, *parts]
        return [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]

    def outputs(*parts: Any) -> list[Any]:
        calls = [{"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"} for id in "ab"]
        results: list[Any] = [{"type": "function_call_output", "call_id": id, "output": "seen"} for id in "ab"]
        results[0]["output"] = [{"type": "input_text", "text": "seen"}, *parts]
        return [*calls, *results]

    begun: Any = {"role": "user", "content": WORDS}
    async with serving(engine) as world:

        async def answered(path: str, messages: list[Any]) -> tuple[int, str]:
            ours = {"messages": messages, "max_tokens": MOST} if "messages" in path else {"input": messages}
            status, _, received = await world.post(path, {"temperature": 0, "max_output_tokens": MOST, **ours})
            assert status == 200, received
            said = received["content"] if "content" in received else received["output"][0]["content"]
            return received["usage"]["input_tokens"], said[0]["text"]

        blocks = [begun, *returned()]
        blocks[-1] = {**blocks[-1], "content": [*blocks[-1]["content"], image]}
        beside = await answered("/v1/messages", blocks)
        assert await answered("/v1/messages", [begun, *returned(image)]) == beside
        shown_by_hand: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        behind = await answered("/v1/responses", [begun, *outputs(), shown_by_hand])
        assert await answered("/v1/responses", [begun, *outputs({"type": "input_image", "image_url": url})]) == behind
        assert behind == beside
        further = [*outputs({"type": "input_image", "image_url": url}), begun]
        assert (await answered("/v1/responses", [begun, *further]))[0] > behind[0]


async def test_image_tokens_count_in_usage(engine: TransformersEngine) -> None:
    async with serving(engine) as world:
        _, one = await chat(world, TEXT, shown(IMAGE))
        _, two = await chat(world, TEXT, shown(IMAGE), shown(picture(90, 20)))
        assert two["usage"]["prompt_tokens"] - one["usage"]["prompt_tokens"] == 16


@pytest.mark.slow
async def test_all_supported_formats_and_color_modes_are_read(engine: TransformersEngine) -> None:
    plain = picture(48, 48, seed=4)
    turned = plain.getexif()
    turned[0x0112] = 6  # a quarter turn, as cameras note it
    async with serving(engine) as world:
        whole = await say(world, shown(plain), TEXT)
        assert await say(world, shown(plain, "WEBP", lossless=True), TEXT) == whole
        assert await say(world, shown(plain.convert("RGBA")), TEXT) == whole
        wrapped = "\n".join(encoded(plain)[at : at + 76] for at in range(0, len(encoded(plain)), 76))
        assert await say(world, said(f"data:image/png;base64,{wrapped}"), TEXT) == whole
        assert await say(world, shown(plain.rotate(90), exif=turned), TEXT) == whole
        for odd in (
            shown(plain.convert("CMYK"), "JPEG"),
            shown(plain.convert("1")),
            shown(plain.convert("P")),
            shown(plain.convert("I;16")),
            shown(plain.convert("P"), "GIF"),
            shown(picture(1, 1)),
            shown(picture(100, 3)),
        ):
            assert (await chat(world, odd, TEXT))[0] == 200


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, content: bytes = b"") -> str:
    """Return a PNG file whose header declares this size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def animated() -> str:
    file = io.BytesIO()
    picture(8, 8).save(file, "GIF", save_all=True, append_images=[picture(8, 8, seed=9)])
    return "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()


def cut(form: str) -> str:
    whole = base64.b64decode(encoded(picture(64, 64), form))
    return f"data:image/{form.lower()};base64," + base64.b64encode(whole[: len(whole) // 2]).decode()


NO_IMAGES = {
    "nothing": ("data:image/png;base64,", "must be an image in base64"),
    "no base64": ("data:image/png;base64,%%%%", "not valid base64"),
    "a text": ("data:text/plain;base64,aGVsbG8=", "does not have an image type"),
    "bytes of a text": ("data:image/png;base64,aGVsbG8gd29ybGQ=", "not a supported image"),
    "a vector drawing": ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "not a supported image"),
    "half a PNG": (cut("PNG"), "damaged or truncated"),
    "half a WebP": (cut("WEBP"), "not a supported image|damaged or truncated"),
    "a head without a body": (png(100, 100), "damaged or truncated"),
    "a bomb": (png(60000, 60000), "pixels"),
    "one pixel too many": (png(4097, MAX_PIXELS // 4096), "4097 x 4096 pixels, the maximum is .* scale it down"),
    "no pixels": (png(0, 5), "damaged|not a supported image"),
    "a thread": (data_url(picture(1, 60)), "at most 50 to 1"),
    "a film": (animated(), "animated; send one frame"),
    "a place in the web": ("https://example.com/cat.png", "URLs are not fetched"),
    "a file of the machine": ("file:///etc/passwd", "URLs are not fetched"),
    "no word of base64": ("data:image/png,abc", "data URL in base64"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
async def test_an_invalid_image_is_rejected_by_name(engine: TransformersEngine, name: str) -> None:
    url, message = NO_IMAGES[name]
    async with serving(engine) as world:
        error = await refused(world, TEXT, said(url))
        assert error["param"] == "messages[0].content[1]"
        assert re.search(message, error["message"]), error["message"]
        assert error["type"] == "invalid_request_error"


async def test_the_sizes_of_all_images_are_checked_before_one_is_decoded(engine: TransformersEngine) -> None:
    async with serving(engine) as world:
        error = await refused(world, said(png(100, 100)), said(png(60000, 60000)))  # the first has no body
        assert error["param"] == "messages[0].content[1]"
        assert "pixels" in error["message"]


def encoded_image(url: str) -> EncodedImage:
    return EncodedImage("messages[0].content[0]", url.partition(",")[2])


def test_all_images_of_a_request_have_bounds_of_pixels_and_bytes_together() -> None:
    largest = encoded_image(png(4096, MAX_PIXELS // 4096))
    count = MAX_REQUEST_PIXELS // MAX_PIXELS
    check_images([largest] * count)
    with pytest.raises(InvalidValue, match="pixels together"):
        check_images([*[largest] * count, encoded_image(png(1, 1))])
    heavy = EncodedImage("messages[0].content[0]", "AAAA" * (MAX_REQUEST_BYTES // 12))
    with pytest.raises(InvalidValue, match="not a supported image"):  # four of them are not too many bytes
        check_images([heavy] * 4)
    with pytest.raises(InvalidValue, match="at most 64 MiB together"):
        check_images([heavy] * 5)


async def test_more_images_than_the_limit_are_rejected(engine: TransformersEngine) -> None:
    async with serving(engine) as world:
        error = await refused(world, shown(IMAGE), shown(IMAGE), TEXT, shown(IMAGE))
        assert error["param"] == "messages[0].content[3]"
        assert "limit-images" in error["message"]


async def test_images_that_exceed_the_context_are_rejected(tmp_path: Path) -> None:
    engine = load(tiny_vision.make("llava", tmp_path), ctx_size=40)
    try:
        async with serving(engine) as world:
            error = await refused(world, *[shown(IMAGE)] * 3)
            assert error["type"] == "exceed_context_size_error"
            assert error["n_prompt_tokens"] > 48
    finally:
        await engine.close()


async def test_a_placeholder_in_the_text_is_not_an_image(engine: TransformersEngine) -> None:
    async with serving(engine) as world:
        error = await refused(world, shown(IMAGE), {"type": "text", "text": "and <image> too"})
        assert "<image>" in error["message"]
        assert (await chat(world, {"type": "text", "text": "no image, but <image>"}))[0] == 200


async def test_images_are_accepted_in_user_messages_only(engine: TransformersEngine) -> None:
    async with serving(engine) as world:
        messages = [{"role": "system", "content": [shown(IMAGE)]}, {"role": "user", "content": "hi"}]
        status, _, received = await world.post("/v1/chat/completions", {"messages": messages})
        assert (status, received["error"]["param"]) == (400, "messages[0].content[0]")
        assert "user messages" in received["error"]["message"]


async def test_detail_is_read_and_reported_as_ignored(engine: TransformersEngine) -> None:
    def detailed(detail: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": data_url(IMAGE), "detail": detail}}

    async with serving(engine) as world:
        body = {"messages": [{"role": "user", "content": [detailed("high")]}], "max_tokens": 1}
        status, headers, _ = await world.post("/v1/chat/completions", body)
        assert status == 200
        assert "content[0].detail" in headers["X-Ignored-Fields"]
        error = await refused(world, detailed("blurred"))
        assert "detail must be one of auto, low, high" in error["message"]


async def test_each_dialect_names_the_image_by_its_own_field(engine: TransformersEngine) -> None:
    wrong = "data:image/png;base64,aGVsbG8="
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": wrong}],
    }
    block = {"role": "user", "content": [TEXT, {"type": "image", "source": source}]}
    asked: list[tuple[str, Any, str]] = [
        ("/v1/responses", {"input": [item]}, "input[0].content[1]"),
        ("/v1/messages", {"messages": [block], "max_tokens": 5}, "messages[0].content[1].source"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "?", "images": ["aGVsbG8="]}]},
            "messages[0].images[0]",
        ),
        ("/api/generate", {"prompt": "?", "images": ["aGVsbG8="]}, "images[0]"),
        ("/api/generate", {"prompt": "?", "images": [encoded(IMAGE)], "raw": True}, "raw prompt"),
    ]
    async with serving(engine) as world:
        for path, body, name in asked:
            status, _, received = await world.post(path, body)
            assert status == 400
            assert name in str(received), received


async def test_images_of_ollama_above_the_limit_are_not_read(engine: TransformersEngine) -> None:
    images = [encoded(IMAGE)] * 9 + [7] * 100_000  # one more than the default of `limit-images`, then what is no image
    async with serving(engine) as world:
        for path, body, name in (
            ("/api/generate", {"prompt": "?", "images": images}, "images[2]"),
            ("/api/chat", {"messages": [{"role": "user", "content": "?", "images": images}]}, "messages[0].images[2]"),
        ):
            status, _, received = await world.post(path, body)
            assert status == 400
            assert f"{name}: this model is served with 2 images" in str(received), received


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llava", {"limit_images": 0}, "set limit-images in its preset"),
        ("vipllava", {}, "are not supported by this version"),
        ("gemma3", {"prefill_chunk": 8}, "is 9 tokens of one step; set prefill-chunk to that or more"),
        ("no processor", {}, "image processor cannot be loaded"),
    ],
)
async def test_a_model_without_images_gives_the_reason_and_answers_texts(
    tmp_path: Path, family: str, settings: dict[str, Any], why: str
) -> None:
    folder = tiny_vision.make(family if family in tiny_vision.FAMILIES else "llava", tmp_path)
    config = folder / "config.json"
    if family == "vipllava":
        config.write_text(config.read_text().replace('"model_type": "llava"', '"model_type": "vipllava"'))
    if family == "no processor":
        (folder / "processor_config.json").unlink()
    engine = load(folder, ctx_size=100, load_format="dummy", **settings)
    try:
        async with serving(engine) as world:
            error = await refused(world, TEXT, shown(IMAGE))
            assert error["param"] == "messages[0].content[1]"
            assert why in error["message"]
            assert (await chat(world, TEXT))[0] == 200
            assert "vision" not in engine.capabilities
    finally:
        await engine.close()


@pytest.mark.parametrize("family", sorted(tiny_vision.FAMILIES))
async def test_the_checkpoint_gives_the_capabilities_of_the_worker(tmp_path: Path, family: str) -> None:
    folder = tiny_vision.make(family, tmp_path)
    engine = load(folder, ctx_size=100)
    try:
        server = Server(engine, engine.tokenizer, options(folder), token=None, announce=lambda event: None)
        assert offered(checkpoint.read(folder), Preset(id="a")) == server.capabilities
    finally:
        await engine.close()


async def test_images_of_all_requests_are_limited_but_one_request_always_proceeds(tmp_path: Path) -> None:
    settings = options(tiny_vision.make("llava", tmp_path))
    tokenizer = load_tokenizer(settings)
    processor = vision.TransformersImageProcessor(settings, load_config(settings), tokenizer)
    eyes = vision.ImageReader(processor, torch.float32, most=4, max_bytes=1)
    image = EncodedImage("here", encoded(IMAGE))
    try:
        first = await eyes.read("<image><image>", [image, image])
        with pytest.raises(QueueFull):
            await eyes.read("<image>", [image])
        del first
        assert len((await eyes.read("<image>", [image]))[1].images) == 1, "room comes back with the request's end"
    finally:
        eyes.close()


async def test_the_event_loop_runs_while_an_image_is_decoded(engine: TransformersEngine) -> None:
    assert engine.vision is not None
    large = EncodedImage("here", encoded(PIL.Image.new("RGB", (2048, 2048))))
    reading = asyncio.ensure_future(engine.vision.read("<image>", [large]))
    passes = 0
    while not reading.done():
        await asyncio.sleep(0)
        passes += 1
    assert len((await reading)[0]) == 16
    assert passes > 10, "the loop stood still"
