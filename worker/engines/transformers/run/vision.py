"""Vision: from the images of a request to embeddings in its prompt.

`ImageReader` opens and prepares images on a thread of its own, with the model's image processor. `VisionTower` runs on
the step loop's thread. It computes the features of an image when the first of its tokens is due, and keeps them until
the last. Only processors based on Pillow are used, not torchvision, so that an image gives the same on every machine.
"""

import asyncio
import importlib.util
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from worker import images
from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.run.forward import PromptEmbeddings
from worker.errors import InvalidValue, QueueFull, UnsupportedField
from worker.images import EncodedImage
from worker.interface import PromptImage, PromptImages
from worker.protocol.architectures import VISION, WHOLE_IMAGES
from worker.protocol.argv import ModelOptions
from worker.protocol.memory import HELD_BYTES

log = logging.getLogger(__name__)

_SIZES = (336, 1024, 4096)  # sides of test images; processors scale to at most one of these. A guess
_NOT_FOR_TOWERS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
)
_LOAD_FAULTS = (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError)


class NoVision(Exception):
    """This model takes no images; the message has the reason."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, as prompt text and as inputs of the tower."""

    text: str  # the prompt text with its placeholder tokens
    inputs: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


def load_image_processor(
    options: ModelOptions, config: Any, tokenizer: transformers.PreTrainedTokenizerBase
) -> tuple["TransformersImageProcessor | None", str]:
    """The image processor, or None with the reason why the model takes no images."""
    try:
        return TransformersImageProcessor(options, config, tokenizer), ""
    except NoVision as why:
        if getattr(config, "vision_config", None) is not None:
            log.warning("no images: %s", why)
        return None, str(why)


class TransformersImageProcessor:
    """The image processor of a model, with the worker's tokenizer."""

    def __init__(self, options: ModelOptions, config: Any, tokenizer: transformers.PreTrainedTokenizerBase):
        """Raises NoVision with the reason if images cannot be served."""
        if config.model_type not in VISION:
            if getattr(config, "vision_config", None) is None:
                raise NoVision(images.TEXT_ONLY)
            raise NoVision(
                f"images for architecture {config.model_type!r} are not supported by this version: the model is served"
                f" for text; those of {', '.join(sorted(VISION))} are"
            )
        if not options.limit_images:
            raise NoVision("this model is served without images; set limit-images in its preset")
        if importlib.util.find_spec("PIL") is None:
            raise NoVision("Pillow, the library that opens images, is not installed: pip install pillow")
        self._is_whole = config.model_type in WHOLE_IMAGES
        self._max_images = options.limit_images
        self._tokenizer = tokenizer
        try:
            self._processor = _load(Path(options.snapshot), config, tokenizer)
        except _LOAD_FAULTS as error:
            raise NoVision(f"this model's image processor cannot be loaded ({cuda_errors.one_line(error)})") from error
        self.placeholder: str = self._processor.image_token
        self.token: int = config.image_token_id
        self._text = str(tokenizer.convert_ids_to_tokens(self.token))
        if self._is_whole:
            import PIL.Image  # late: only for models with vision

            tokens = self.prepare(PIL.Image.new("RGB", (64, 64)), torch.float32).text.count(self._text)
            if tokens > min(options.prefill_chunk, options.ctx_size or tokens):
                raise NoVision(
                    f"an image of this model is {tokens} tokens of one step; set prefill-chunk to that or more"
                )

    def prepare(self, picture: Any, dtype: torch.dtype) -> PreparedImage:
        """Prepare one opened image for a tower of this dtype. Raises ValueError if the processor cannot use it."""
        made = self._processor(
            images=[picture],
            text=[self.placeholder],
            return_text_replacement_offsets=True,
            return_tensors="pt",
            add_special_tokens=False,
            input_data_format="channels_last",
        )
        ((replaced,),) = made["text_replacement_offsets"]
        inputs = {name: tensor for name, tensor in made.items() if name not in _NOT_FOR_TOWERS}
        return PreparedImage(
            replaced["replacement"], {name: _cast(name, tensor, dtype) for name, tensor in inputs.items()}
        )

    def largest(self, dtype: torch.dtype, ctx_size: int) -> tuple[PromptImage, int] | None:
        """The image that costs the tower most and fits into the context, and the bytes of all images of a request.

        None if no image fits.
        """
        import PIL.Image  # late: only for models with vision

        found: list[tuple[int, PromptImage]] = []
        for side in _SIZES:
            prepared = self.prepare(PIL.Image.new("RGB", (side, side)), dtype)
            if found and found[-1][0] == prepared.bytes:
                break  # the processor scales all images to one size
            tokens, (picture,) = self.lay_out(self.placeholder, [prepared])
            if len(tokens) < ctx_size:
                found.append((prepared.bytes, picture))
        if not found:
            return None
        most, picture = max(found, key=lambda entry: entry[0])
        return picture, most * min(self._max_images, max(ctx_size // picture.tokens, 1))

    def lay_out(self, prompt: str, prepared: Sequence[PreparedImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Tokens of `prompt` with each placeholder replaced by its image's tokens, and the positions of the images.

        Raises InvalidValue if the number of placeholders is not that of the images."""
        pieces = prompt.split(self.placeholder)
        if len(pieces) != len(prepared) + 1:
            raise InvalidValue(
                f"this model's chat template gives {len(pieces) - 1} places to {len(prepared)} images: send images in"
                f" messages of the user, and no text that holds {self.placeholder}",
                param="messages",
            )
        text = "".join(piece + image.text for piece, image in zip(pieces, prepared, strict=False)) + pieces[-1]
        tokens: list[int] = self._tokenizer([text], add_special_tokens=False, verbose=False)["input_ids"][0]
        runs = list(_runs(tokens, self.token))
        prompt_images = []
        for image in prepared:
            image_runs = []
            left = image.text.count(self._text)
            while left and runs:
                begin, length = runs.pop(0)
                image_runs.append((begin, min(length, left)))
                if length > left:  # two images without text between them
                    runs.insert(0, (begin + left, length - left))
                left -= image_runs[-1][1]
            if left:
                break
            prompt_images.append(PromptImage(tuple(image_runs), image.inputs, self._is_whole))
        if runs or len(prompt_images) != len(prepared) or not all(image.runs for image in prompt_images):
            raise InvalidValue(f"messages must not contain {self._text}, which stands for images", param="messages")
        return tokens, tuple(prompt_images)


class ImageReader:
    """Implements `worker.interface.ImageProcessor`."""

    def __init__(
        self,
        processor: TransformersImageProcessor,
        dtype: torch.dtype,
        *,
        most: int,
        max_bytes: int = HELD_BYTES,
    ):
        """`most`: images in one prompt; `max_bytes`: of prepared images of all requests together."""
        self._processor, self._dtype, self._max_images, self._max_bytes = processor, dtype, most, max_bytes
        # A block in which main memory is taken for images, on the thread below.
        self.announced: Callable[[], AbstractContextManager[object]] = nullcontext
        # One thread and no OpenMP helpers: these would slow the step loop's threads down (`memory.end_helpers`).
        self._thread = ThreadPoolExecutor(1, "images", initializer=torch.set_num_threads, initargs=(1,))
        self._lock = threading.RLock()  # a finalizer takes it, and may run on this thread while it is held
        self._bytes = 0

    @property
    def placeholder(self) -> str:
        return self._processor.placeholder

    async def read(self, prompt: str, images: Sequence[EncodedImage]) -> tuple[list[int], PromptImages]:
        """See `worker.interface.ImageProcessor`."""
        if len(images) > self._max_images:
            raise UnsupportedField(
                f"{images[self._max_images].where}: this model is served with {self._max_images} images in a prompt at"
                " most; raise limit-images in its preset",
                param=images[self._max_images].where,
            )
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, prompt, images)

    def close(self) -> None:
        """Stop the thread and cancel waiting images."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, prompt: str, stated: Sequence[EncodedImage]) -> tuple[list[int], PromptImages]:
        with self.announced():
            images.check_images(stated)
            prepared = [self._prepare(image) for image in stated]
            tokens, placed = self._processor.lay_out(prompt, prepared)
            prompt_images = PromptImages(placed)
            self._count(prompt_images, sum(image.bytes for image in prepared))
            return tokens, prompt_images

    def _prepare(self, image: EncodedImage) -> PreparedImage:
        try:
            return self._processor.prepare(images.open_image(image), self._dtype)
        except InvalidValue:
            raise
        except Exception as error:  # noqa: BLE001 - untrusted input: processors raise anything
            log.warning("an image could not be prepared: %s", type(error).__name__)
            raise InvalidValue(
                f"{image.where}: this model's processor cannot use the image ({cuda_errors.one_line(error)})",
                param=image.where,
            ) from None

    def _count(self, prompt_images: PromptImages, size: int) -> None:
        """Count the bytes of `prompt_images` until they are garbage collected. Raises QueueFull."""
        with self._lock:
            if self._bytes and self._bytes + size > self._max_bytes:
                raise QueueFull("requests with images are waiting for this model already; try again later")
            self._bytes += size
        weakref.finalize(prompt_images, self._uncount, size)

    def _uncount(self, size: int) -> None:
        with self._lock:
            self._bytes -= size


class VisionTower:
    """The vision tower of a model, and the features of images whose tokens are being computed."""

    def __init__(self, model: Any, token: int, device: torch.device):
        """`token`: the token that stands for images in a prompt."""
        self._model, self._token, self._device = model, token, device
        self._token_embeddings = model.get_input_embeddings()
        self._features: dict[PromptImage, torch.Tensor] = {}

    def features(self, picture: PromptImage) -> torch.Tensor:
        """Features of an image, `[tokens, hidden]`: the embeddings of its tokens."""
        inputs = {name: tensor.to(self._device) for name, tensor in picture.inputs.items()}
        found = self._model.get_image_features(**inputs, return_dict=True).pooler_output
        whole = torch.cat(list(found)) if isinstance(found, list | tuple) else found
        return whole.reshape(-1, whole.shape[-1])

    def embed_prompt(self, tokens: Sequence[int], start: int, prompt_images: PromptImages) -> PromptEmbeddings:
        """Embeddings of the prompt's `tokens`, the first of which has position `start`."""
        kinds = None
        if any(picture.is_whole for picture in prompt_images.images):
            kinds = torch.zeros(1, start + len(tokens), dtype=torch.int64, device=self._device)
            for begin, length in (run for picture in prompt_images.images for run in picture.runs):
                kinds[0, begin : begin + length] = 1
        return PromptEmbeddings(self._embed(tokens, start, prompt_images), kinds)

    def _embed(self, tokens: Sequence[int], start: int, prompt_images: PromptImages) -> torch.Tensor | None:
        """`[1, tokens, hidden]`; None if no image has one of these tokens."""
        end = start + len(tokens)
        due = [picture for picture in prompt_images.images if _overlaps(picture, start, end)]
        if not due:
            return None
        ids = memory.upload([0 if token == self._token else token for token in tokens], self._device)
        # The image token may lie outside the embedding table, so 0 takes its place here.
        embedded: torch.Tensor = self._token_embeddings(ids[None]).clone()
        for picture in due:
            features = self._features.get(picture)
            if features is None:
                features = self._features[picture] = self.features(picture).to(embedded.dtype)
            first = 0
            for begin, length in picture.runs:
                low, high = max(begin, start), min(begin + length, end)
                if low < high:
                    part = features[first + low - begin : first + high - begin]
                    embedded[0, low - start : high - start] = part
                first += length
            if first != len(features):
                raise ValueError(f"the tower gives {len(features)} features for {first} tokens")
            if picture.end <= end:
                del self._features[picture]
        return embedded

    def forget(self, prompt_images: PromptImages) -> None:
        """Drop the features of a prompt that is not computed any further."""
        for picture in prompt_images.images:
            self._features.pop(picture, None)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest type that the tower accepts."""
    if name.endswith("_mask"):
        return tensor.bool()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _overlaps(picture: PromptImage, start: int, end: int) -> bool:
    return any(begin < end and start < begin + length for begin, length in picture.runs)


def _runs(tokens: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    """Position and length of each unbroken run of `token`."""
    for is_token, group in groupby(enumerate(tokens), key=lambda entry: entry[1] == token):
        if is_token:
            positions = [position for position, _ in group]
            yield positions[0], len(positions)


def _load(folder: Path, config: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> Any:
    """The processor of this configuration's family, with `tokenizer` instead of a second copy of it."""
    cls: Any = PROCESSOR_MAPPING[type(config)]
    auto: Any = transformers.AutoImageProcessor
    stated, _ = cls.get_processor_dict(folder, local_files_only=True)
    image_processor = auto.from_pretrained(folder, backend="pil", local_files_only=True)
    return cls.from_args_and_dict([image_processor, tokenizer], stated)
