"""API keys and their rights, from flags and from the text of key files. Pure functions."""

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from router.config.settings import KEY, Settings
from router.errors import ConfigError

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """An API key and its rights. Only the digest of the key is stored."""

    name: str = ""  # for logs
    digest: bytes = dataclasses.field(repr=False)  # SHA-256
    admin: bool = False
    models: tuple[str, ...] = ()  # globs of model names; empty: all models
    max_concurrent: int = 0  # requests at once; 0: no limit


def parse_keys(text: str, admin: bool, *, file: str = "") -> tuple[ApiKey, ...]:
    """Parse a key file. Each line is `KEY [name=N] [admin] [models=GLOB,GLOB] [max-concurrent=N]`; `#`: comment.

    KEY may be `sha256:<hex>`. With `admin` all keys of the file are admin keys. Raises ConfigError with one line per
    problem; none of them contains a key.
    """
    keys: list[ApiKey] = []
    lines_of: dict[bytes, int] = {}
    problems: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        try:
            key = _key(words, admin)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
            continue
        if key.digest in lines_of:
            problems.append(f"{file}:{number}: the same key as in line {lines_of[key.digest]}")
        lines_of.setdefault(key.digest, number)
        keys.append(key)
    if problems:
        raise ConfigError(*problems)
    return tuple(keys)


def configured_keys(settings: Settings, *, user_file: str = "", admin_file: str = "") -> tuple[ApiKey, ...]:
    """All keys from the flags and the text of the two key files. Raises ConfigError."""
    keys = [
        *(ApiKey(digest=digest(key)) for key in settings.api_key),
        *(ApiKey(digest=digest(key), admin=True) for key in settings.admin_key),
    ]
    problems: list[str] = []
    for file, text, admin in ((settings.api_key_file, user_file, False), (settings.admin_key_file, admin_file, True)):
        if not file:
            continue
        try:
            found = parse_keys(text, admin, file=file)
        except ConfigError as error:
            problems += error.problems
            continue
        if not found:
            problems.append(f"{file}: has no key; write one a line")
        if {key.digest for key in found} & {key.digest for key in keys}:
            problems.append(f"{file}: has a key that is given elsewhere as well; remove one of the two")
        keys += found
    if problems:
        raise ConfigError(*problems)
    return tuple(keys)


def digest(key: str) -> bytes:
    """The digest that is stored and compared in place of a key."""
    return hashlib.sha256(key.encode()).digest()


def _key(words: list[str], admin: bool) -> ApiKey:
    secret, *rest = words
    hashed = _DIGEST.fullmatch(secret)
    if not hashed and (not KEY.fullmatch(secret) or secret.startswith("sha256:")):
        raise ValueError("the key must be 1 to 512 ASCII characters without blanks, or sha256: and 64 hex digits")
    fields: dict[str, Any] = {"digest": bytes.fromhex(hashed[1]) if hashed else digest(secret), "admin": admin}
    for word in rest:
        name, has_value, value = word.partition("=")
        if name == "admin" and not has_value:
            fields["admin"] = True
        elif name == "name" and re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", value):
            fields["name"] = value
        elif name == "models" and value.strip(",") and re.fullmatch(r"[A-Za-z0-9._:/@+*?\[\]!,-]{1,4096}", value):
            fields["models"] = tuple(glob for glob in value.split(",") if glob)
        elif name == "max-concurrent" and re.fullmatch(r"[1-9][0-9]{0,5}", value):
            fields["max_concurrent"] = int(value)
        elif name in {"name", "models", "max-concurrent"}:
            raise ValueError(f"{name}= needs a {'number of 1 or more' if name == 'max-concurrent' else 'plain value'}")
        else:
            raise ValueError("after the key only name=, admin, models= and max-concurrent= may stand")
    if fields["admin"] and fields.get("models"):
        raise ValueError("an admin key may use every model; remove models= or admin")
    return ApiKey(**fields)
