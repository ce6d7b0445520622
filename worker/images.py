"""Images of a request: location, encoding and safe decoding.

Images are part of the request body, as data URLs or as base64; URLs are never fetched. Decoding treats the bytes as
untrusted: few formats, a limit on the pixels, one frame.
"""

import base64
import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.errors import InvalidValue, UnsupportedField

if TYPE_CHECKING:
    import PIL.Image

# error message for images sent to a model without vision
TEXT_ONLY = "this model takes text, not images; use a model whose input_modalities include image"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 1 << 24  # Pixels of one image: 4096 x 4096. Decoding takes 4 bytes per pixel, and 3 more for the RGB copy.
MAX_REQUEST_PIXELS = 4 * MAX_PIXELS  # of all images of a request; decoding takes about 10 ns per pixel
MAX_REQUEST_BYTES = 64 << 20  # of all images of a request, encoded as in their files
# Longer side to shorter side. Image processors scale the shorter side up to hundreds of pixels, so a thin image would
# become huge.
MAX_RATIO = 50
_DATA_URL = re.compile(r"data:(?P<media>[a-zA-Z0-9.+/-]{0,127})(?:;[a-zA-Z0-9=._-]{1,64}){0,4};base64\Z")
_LONGEST_HEAD = 512
_KINDS = "PNG, JPEG, WebP and GIF"


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One image of a request, not decoded yet."""

    where: str  # request field that holds it, for errors
    data: str  # base64


def from_url(where: str, url: Any) -> EncodedImage:
    """Return the image of a data URL. Raise InvalidValue, or UnsupportedField for any other URL."""
    if not isinstance(url, str):
        raise InvalidValue(f"{where} must be a data URL: data:image/png;base64,...", param=where)
    if not url[:5].lower() == "data:":
        raise UnsupportedField(
            f"{where}: URLs are not fetched; send the image itself, as data:image/png;base64,...", param=where
        )
    head, comma, data = url.partition(",")
    given = _DATA_URL.fullmatch("data:" + head[5:]) if comma and len(head) <= _LONGEST_HEAD else None
    if given is None:
        raise InvalidValue(f"{where} must be a data URL in base64: data:image/png;base64,...", param=where)
    return from_base64(where, data, given["media"])


def from_base64(where: str, data: Any, media: Any = "image/") -> EncodedImage:
    """Return the image with base64 content `data` and media type `media`. Raise InvalidValue for a type that is not an
    image."""
    if not isinstance(media, str) or not media.lower().startswith("image/"):
        raise InvalidValue(f"{where} does not have an image type; supported: {_KINDS}", param=where)
    if not isinstance(data, str) or not data:
        raise InvalidValue(f"{where} must be an image in base64", param=where)
    return EncodedImage(where, data)


def check_images(images: Sequence[EncodedImage]) -> None:
    """Check the sizes of all images of a request from the headers of their files, before one of them is decoded.

    Reads all bytes, so call it from a thread. Raise InvalidValue naming the field.
    """
    size = pixels = 0
    for image in images:
        size += len(image.data) * 3 // 4  # base64
        if size > MAX_REQUEST_BYTES:
            raise InvalidValue(
                f"{image.where}: the images of a request have at most {MAX_REQUEST_BYTES >> 20} MiB together; send"
                " smaller files",
                param=image.where,
            )
    for image in images:
        with _opened(image) as picture:
            pixels += picture.width * picture.height
        if pixels > MAX_REQUEST_PIXELS:
            raise InvalidValue(
                f"{image.where}: the images of a request have at most {MAX_REQUEST_PIXELS} pixels together; scale them"
                " down",
                param=image.where,
            )


def open_image(image: EncodedImage) -> "PIL.Image.Image":
    """Decode the image to upright RGB. Needs time and memory in proportion to MAX_PIXELS, so call it from a thread.

    Raise InvalidValue naming the field for anything but one complete still image of a supported size.
    """
    import PIL.ImageOps  # imported late: only vision models need it

    with _opened(image) as picture:
        plain = picture.convert("RGB")
        PIL.ImageOps.exif_transpose(plain, in_place=True)
    return plain


@contextlib.contextmanager
def _opened(image: EncodedImage) -> Iterator["PIL.Image.Image"]:
    """Open an image without decoding it. Raise InvalidValue naming the field, also for errors inside the block."""
    import PIL.Image

    where = image.where
    try:
        content = base64.b64decode("".join(image.data.split()), validate=True)  # line breaks are allowed
    except ValueError:
        raise InvalidValue(f"{where} is not valid base64", param=where) from None
    try:
        with PIL.Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check(where, picture)
            yield picture
    except InvalidValue:
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidValue(f"{where} is not a supported image; supported: {_KINDS}", param=where) from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise InvalidValue(f"{where} has more than {MAX_PIXELS} pixels; scale it down", param=where) from None
    except Exception as error:  # noqa: BLE001 - untrusted bytes; decoders raise various errors
        raise InvalidValue(f"{where} is damaged or truncated ({type(error).__name__})", param=where) from None


def _check(where: str, picture: "PIL.Image.Image") -> None:
    """Raise InvalidValue from the file header alone, before memory for the pixels is allocated."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InvalidValue(
            f"{where} has {width} x {height} pixels, the maximum is {MAX_PIXELS}; scale it down", param=where
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidValue(
            f"{where} has {width} x {height} pixels; the aspect ratio must be at most {MAX_RATIO} to 1", param=where
        )
    if getattr(picture, "is_animated", False):
        raise InvalidValue(f"{where} is animated; send one frame of it", param=where)
