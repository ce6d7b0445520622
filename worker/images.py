"""Images of a request: where they stand, how they are sent, and what may be opened.

They come within the body, as data URLs or as base64; nothing is fetched for anybody. What opens one treats it as what
it is, bytes from a stranger: a few formats, a bound on its pixels, one frame.
"""

import base64
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.errors import InvalidValue, UnsupportedField

if TYPE_CHECKING:
    import PIL.Image

TEXT_ONLY = "this model takes text, not images; ask one whose input_modalities name image"
"""What is said of images to a model without vision."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 1 << 24
"""Of one image: 4096 x 4096. Each takes 4 bytes while it is opened, and 3 more as plain colours."""
MAX_RATIO = 50
"""Of the longer side to the shorter one: processors bring the shorter one to hundreds of pixels."""
_DATA_URL = re.compile(r"data:(?P<media>[a-zA-Z0-9.+/-]{0,127})(?:;[a-zA-Z0-9=._-]{1,64}){0,4};base64\Z")
_LONGEST_HEAD = 512
_KINDS = "PNG, JPEG, WebP and GIF"


@dataclass(frozen=True, slots=True)
class Image:
    """One image as a request states it, not looked at yet."""

    where: str
    """The field that holds it, for errors."""
    data: str
    """Base64."""


def from_url(where: str, url: Any) -> Image:
    """The image in a data URL. Raises InvalidValue, and UnsupportedField for any other URL."""
    if not isinstance(url, str):
        raise InvalidValue(f"{where} must be a data URL: data:image/png;base64,...", param=where)
    if not url[:5].lower() == "data:":
        raise UnsupportedField(
            f"{where}: no URL is fetched here; send the image itself, as data:image/png;base64,...", param=where
        )
    head, comma, data = url.partition(",")
    stated = _DATA_URL.fullmatch("data:" + head[5:]) if comma and len(head) <= _LONGEST_HEAD else None
    if stated is None:
        raise InvalidValue(f"{where} must be a data URL in base64: data:image/png;base64,...", param=where)
    return of_base64(where, data, stated["media"])


def of_base64(where: str, data: Any, media: Any = "image/") -> Image:
    """The image that `data` spells; `media` is what its type is said to be. Raises InvalidValue."""
    if not isinstance(media, str) or not media.lower().startswith("image/"):
        raise InvalidValue(f"{where} is said to be no image; {_KINDS} can be read", param=where)
    if not isinstance(data, str) or not data:
        raise InvalidValue(f"{where} must be an image in base64", param=where)
    return Image(where, data)


def opened(image: Image) -> "PIL.Image.Image":
    """The image in plain colours, upright. Takes time and MAX_PIXELS' memory: to be called from a thread.

    Raises InvalidValue naming the field for whatever is no whole, single image of a bearable size.
    """
    import PIL.Image  # late: only for models that see
    import PIL.ImageOps

    where = image.where
    try:
        content = base64.b64decode(image.data if _is_plain(image.data) else "".join(image.data.split()), validate=True)
    except ValueError:
        raise InvalidValue(f"{where} is no valid base64", param=where) from None
    try:
        with PIL.Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check(where, picture)
            plain = picture.convert("RGB")
        PIL.ImageOps.exif_transpose(plain, in_place=True)
        return plain
    except InvalidValue:
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidValue(f"{where} is no image that can be read; {_KINDS} can", param=where) from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise InvalidValue(f"{where} has more than {MAX_PIXELS} pixels; scale it down", param=where) from None
    except Exception as error:  # noqa: BLE001 - bytes of a stranger, and whatever a decoder makes of them
        raise InvalidValue(f"{where} is damaged or cut short ({type(error).__name__})", param=where) from None


def _is_plain(data: str) -> bool:
    """No lines: the usual case, and one that needs no copy."""
    return not any(blank in data for blank in "\n\r\t ")


def _check(where: str, picture: "PIL.Image.Image") -> None:
    """Raises InvalidValue by what the file's head says, before anything of its size is made."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InvalidValue(
            f"{where} has {width} x {height} pixels; at most {MAX_PIXELS} can be read: scale it down", param=where
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidValue(
            f"{where} has {width} x {height} pixels; one side may be {MAX_RATIO} times the other at most", param=where
        )
    if getattr(picture, "is_animated", False):
        raise InvalidValue(f"{where} is animated; send one frame of it", param=where)
