"""The router's own options, each written once.

A flag wins over `ROUTER_<FLAG>`, that over llama-server's variable, that over the default. Law: PURE; the environment
and the text of key files come in as values.
"""

import dataclasses
import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import ConfigError
from router.ini import Problem
from router.values import MIB, Choice, Flag, Integer, Kind, Memory, MemoryByDevice, Names, Seconds, Text

MAX_BUFFERED = 512 * MIB
"""Bytes of all request bodies together, so no single one may be larger."""
LATER = frozenset({
    "cluster", "log-file", "secure-mode",
    "ssl-cert-file", "ssl-key-file", "ui", "worker-port-range",
})  # fmt: skip
"""Router options of the design that this version does not have: not to be mistaken for model keys."""
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_QUADS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one router was started with. Bytes are int; times are float seconds."""

    models_preset: str = ""
    """File; empty: none was named."""
    models_dir: str = ""
    models_cache: bool = True
    default_model: str = ""
    unknown_model: str = "reject"
    models_autoload: bool = True
    models_watch: bool = False

    models_max: int | None = None
    """None: not given; see `workers_at_once`."""
    models_memory_margin: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"": 1024 * MIB})
    """Bytes by device name; "" holds for all others."""
    device_limit: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes by device name."""
    sleep_memory: int = 0
    """Bytes."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_prefix: str = ""
    """Before every path; begins with a slash, ends without one."""
    slots: bool = True
    timeout: float = 3600.0
    """Of one request; 0.0: none."""
    body_timeout: float = 60.0
    write_stall: float = 30.0
    max_body_size: int = 64 * MIB
    stream_commit_seconds: float = 10.0
    sse_ping_interval: float = 15.0
    """-1.0: off."""
    cors_origins: tuple[str, ...] = ()
    strict_fields: bool = False
    strict_presets: bool = False

    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    api_key_file: str = ""
    admin_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_key_file: str = ""
    allow_unauthenticated: bool = False
    metrics_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    offline: bool = False
    hf_token: str = dataclasses.field(default="", repr=False)

    queue_size: int = 4000
    queue_timeout: float = 300.0
    swap_patience: float = 10.0
    drain_timeout: float = 30.0
    evict_timeout: float = -1.0
    """-1.0: off, an eviction waits for running requests as long as they take."""

    log_level: str = "info"
    log_format: str = "text"
    access_log: str = "all"
    state_dir: str = ""
    """Empty: the platform's, chosen where it is used."""
    runtime_dir: str = ""
    nursery: bool = True
    prepare: bool = True
    hub_cache: str = ""
    """Folder of downloaded repositories; has no flag, as all programs of the hub share its variables."""

    @property
    def workers_at_once(self) -> int:
        """Workers at once; 0: unlimited. Without a margin memory decides nothing, so a count does: 4."""
        if self.models_max is not None:
            return self.models_max
        return 0 if any(self.models_memory_margin.values()) else 4

    def margin(self, device: str) -> int:
        """Bytes to keep free on the device of that name."""
        return self.models_memory_margin.get(device, self.models_memory_margin.get("", 0))


@dataclass(frozen=True)
class _Secret:
    """One key, or several with commas; never repeated in a message."""

    many: bool = True
    hint: str = "KEY"

    def read(self, text: str) -> Any:
        items = [item.strip() for item in (text.split(",") if self.many else [text]) if item.strip()]
        if not items or not all(_KEY.fullmatch(item) for item in items):
            raise ValueError("a key must be 1 to 512 ASCII characters without blanks")
        return tuple(items) if self.many else items[0]

    def write(self, value: Any) -> str:
        return "***" if value else ""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag."""

    flag: str
    """Without dashes."""
    kind: Kind
    group: str
    help: str
    also: tuple[str, ...] = ()
    """Further flags, with dashes."""
    env: tuple[str, ...] = ()
    """Variables read after ROUTER_<FLAG>."""
    unset: str = ""
    """What holds by default, where the default does not say it."""

    @property
    def field(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        return ("ROUTER_" + self.field.upper(), *self.env)

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)


_FILE, _FOLDER = Text("FILE"), Text("DIR")
MODELS, MEMORY, HTTP, ACCESS, QUEUE, LOGS = "Models", "Memory", "HTTP", "Access", "Queue", "Logs"
GROUPS = (MODELS, MEMORY, HTTP, ACCESS, QUEUE, LOGS)

OPTIONS: tuple[Option, ...] = (
    Option(flag="models-preset", kind=_FILE, group=MODELS, env=("LLAMA_ARG_MODELS_PRESET",), unset="built-in demo",
           help="INI file of models; the demo only if no model is named"),
    Option(flag="models-dir", kind=_FOLDER, group=MODELS, env=("LLAMA_ARG_MODELS_DIR",), unset="none",
           help="folder whose folders are models"),
    Option(flag="models-cache", kind=Flag(), group=MODELS, help="list the complete models of the Hugging Face cache"),
    Option(flag="models-autoload", kind=Flag(), group=MODELS, env=("LLAMA_ARG_MODELS_AUTOLOAD",),
           help="load a model when it is asked for"),
    Option(flag="models-watch", kind=Flag(), group=MODELS, help="reload when the file or the folder of models changes"),
    Option(flag="default-model", kind=Text("ID"), group=MODELS, unset="none", help="for requests that name none"),
    Option(flag="unknown-model", kind=Choice(("reject", "default")), group=MODELS,
           help="what a request for an unknown model gets"),
    Option(flag="strict-presets", kind=Flag(), group=MODELS, help="options without meaning here are errors"),
    Option(flag="offline", kind=Flag(), group=MODELS, env=("LLAMA_ARG_OFFLINE", "LLAMA_OFFLINE"),
           help="fetch nothing"),
    Option(flag="hf-token", kind=_Secret(many=False), group=MODELS, env=("HF_TOKEN",), unset="none",
           also=("-hft",), help="for downloads only"),
    Option(flag="state-dir", kind=_FOLDER, group=MODELS, unset="the platform's",
           help="estimates, converted snapshots, weights of demo models"),
    Option(flag="runtime-dir", kind=_FOLDER, group=MODELS, unset="the platform's", help="sockets and process records"),
    Option(flag="nursery", kind=Flag(), group=MODELS,
           help="fork workers from a process with its imports done; off: each imports for itself, 3 s"),
    Option(flag="prepare", kind=Flag(), group=MODELS,
           help="convert what each load would convert, once, when idle; takes the disk space of mixtures of experts"),

    Option(flag="models-memory-margin", kind=MemoryByDevice(hint="MiB"), group=MEMORY,
           help="kept free on every device, or cuda:0=2048,cpu=4096; 0: no eviction by memory, only by count"),
    Option(flag="device-limit", kind=MemoryByDevice(low=1, named=True, hint="DEV=MiB"), group=MEMORY, unset="none",
           help="treat a device as smaller than it is: cpu=600"),
    Option(flag="sleep-memory", kind=Memory(), group=MEMORY, unset="0: none",
           help="main memory, in MiB, in which weights of models that had to leave are held"),
    Option(flag="models-max", kind=Integer(0, 100_000), group=MEMORY, env=("LLAMA_ARG_MODELS_MAX",),
           unset="0; 4 if the margin is 0", help="workers at once; 0: as memory allows"),

    Option(flag="host", kind=Text("ADDRESS"), group=HTTP, env=("LLAMA_ARG_HOST",),
           help="to listen on; several with commas, or a path ending in .sock"),
    Option(flag="port", kind=Integer(0, 65535), group=HTTP, env=("LLAMA_ARG_PORT",), help="0: any free one"),
    Option(flag="api-prefix", kind=Text("/PATH", r"(/[A-Za-z0-9._~-]+)+", "is no path such as /llm"), group=HTTP,
           env=("LLAMA_ARG_API_PREFIX",), unset="none", help="before every path, for a server behind a proxy"),
    Option(flag="slots", kind=Flag(), group=HTTP, env=("LLAMA_ARG_ENDPOINT_SLOTS",),
           help="tell at GET /slots who takes which place in which batch"),
    Option(flag="timeout", kind=Seconds(off=0.0), group=HTTP, also=("-to",), env=("LLAMA_ARG_TIMEOUT",),
           help="of one request; 0: none"),
    Option(flag="body-timeout", kind=Seconds(low=0.1), group=HTTP, help="for a request's body to arrive"),
    Option(flag="write-stall", kind=Seconds(low=0.1), group=HTTP, help="before a client that reads nothing is dropped"),
    Option(flag="max-body-size", kind=Memory(low=1024), group=HTTP, help="of one request, in MiB"),
    Option(flag="stream-commit-seconds", kind=Seconds(), group=HTTP,
           help="before a waiting stream gets its status line"),
    Option(flag="sse-ping-interval", kind=Seconds(low=0.1, off=-1.0), group=HTTP,
           env=("LLAMA_ARG_SSE_PING_INTERVAL",), help="comments in a silent stream; -1: off"),
    Option(flag="cors-origins", kind=Names(r"\*|localhost|https?://[^/\s]+", "is no origin such as http://host:80"),
           group=HTTP, env=("LLAMA_ARG_CORS_ORIGINS",), unset="none", help="pages that may call this server"),
    Option(flag="strict-fields", kind=Flag(), group=HTTP, help="refuse request fields that are unknown"),

    Option(flag="api-key", kind=_Secret(), group=ACCESS, env=("LLAMA_API_KEY", "LLAMA_ARG_API_KEY"), unset="none",
           help="clients need it; several with commas"),
    Option(flag="api-key-file", kind=_FILE, group=ACCESS, env=("LLAMA_ARG_API_KEY_FILE",), unset="none",
           help="one key a line, mode 0600"),
    Option(flag="admin-key", kind=_Secret(), group=ACCESS, unset="none", help="needed to load, unload and look inside"),
    Option(flag="admin-key-file", kind=_FILE, group=ACCESS, unset="none", help="the same, from a file"),
    Option(flag="allow-unauthenticated", kind=Flag(), group=ACCESS,
           help="listen beyond this machine without any key"),
    Option(flag="metrics-public", kind=Flag(), group=ACCESS, help="GET /metrics without a key"),
    Option(flag="allowed-hosts", kind=Names(r"\*|(?:\*\.)?[A-Za-z0-9.-]+|\[?[0-9A-Fa-f:.]+\]?", "is no host name"),
           group=ACCESS, unset="none", help="names in Host headers; *: any"),

    Option(flag="queue-size", kind=Integer(1), group=QUEUE, help="waiting requests of all models"),
    Option(flag="queue-timeout", kind=Seconds(low=0.1), group=QUEUE, help="longest wait for room"),
    Option(flag="swap-patience", kind=Seconds(), group=QUEUE,
           help="wait before a busy worker past its turn is retired"),
    Option(flag="drain-timeout", kind=Seconds(), group=QUEUE,
           help="from an unload, a changed preset or a stop until streams are cut"),
    Option(flag="evict-timeout", kind=Seconds(off=-1.0), group=QUEUE, unset="off",
           help="the same for an eviction; off: running requests end by themselves"),

    Option(flag="log-level", kind=Choice(("debug", "info", "warning", "error"), {"warn": "warning"}), group=LOGS,
           help="least severe lines to write"),
    Option(flag="log-format", kind=Choice(("text", "json")), group=LOGS, help="of lines on stderr"),
    Option(flag="access-log", kind=Choice(("all", "errors", "off")), group=LOGS, help="which requests to log"),
)  # fmt: skip

BY_FLAG: Mapping[str, Option] = {option.flag: option for option in OPTIONS}
BY_VARIABLE: Mapping[str, Option] = {name: option for option in OPTIONS for name in option.variables}


def parse(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Settings, tuple[Problem, ...]]:
    """Settings from flags (`given`, by name without dashes) and variables; not to be used if there are problems."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for option in OPTIONS:
        text, origin = _source(option, given, environ)
        if not origin:
            continue
        origins[option.field] = origin
        try:
            values[option.field] = option.kind.read(text)
        except ValueError as error:
            problems.append(Problem(origin, 0, "", option.flag, str(error)))
    margin = values.get("models_memory_margin")
    if margin is not None and "" not in margin:
        values["models_memory_margin"] = {"": 1024 * MIB, **margin}
    settings = Settings(**values, hub_cache=hub_cache(environ))
    return settings, (*problems, *_contradictions(settings, origins))


def _source(option: Option, given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Text and where it came from; both empty if nothing was said. An empty variable says nothing."""
    if option.flag in given:
        return given[option.flag], f"--{option.flag}"
    variable = next((name for name in option.variables if environ.get(name)), "")
    return environ.get(variable, ""), variable


def _contradictions(settings: Settings, origins: Mapping[str, str]) -> Iterator[Problem]:
    def fault(flag: str, message: str) -> Problem:
        return Problem(origins.get(BY_FLAG[flag].field, f"--{flag}"), 0, "", flag, message)

    has_keys = any(field in origins for field in ("api_key", "api_key_file", "admin_key", "admin_key_file"))
    hosts = [host.strip() for host in settings.host.split(",")]
    public = [host for host in hosts if not is_local(host)]
    if not all(hosts):
        yield fault("host", "an address is empty; write one, or several with commas")
    elif wrong := next(filter(_QUADS.fullmatch, (host for host in public if not _is_address(host))), None):
        yield fault("host", f"{wrong} is no address; write four numbers up to 255, or a name")
    elif public and not has_keys and not settings.allow_unauthenticated:
        message = f"{public[0]} is open to other machines; give --api-key-file, or --allow-unauthenticated"
        yield fault("host", message)
    if settings.allow_unauthenticated and has_keys:
        yield fault("allow-unauthenticated", "keys are given as well; remove one of the two")
    if settings.unknown_model == "default" and not settings.default_model:
        yield fault("unknown-model", "default needs --default-model")
    if settings.max_body_size > MAX_BUFFERED:
        yield fault("max-body-size", f"at most {MAX_BUFFERED // MIB} MiB, what all bodies together may take")
    if "*" in settings.cors_origins and len(settings.cors_origins) > 1:
        yield fault("cors-origins", "* already allows all origins; remove the others")
    for flag, keys in (("api-key", settings.api_key), ("admin-key", settings.admin_key)):
        if len(set(keys)) < len(keys):
            yield fault(flag, "the same key stands there twice")
    if set(settings.api_key) & set(settings.admin_key):
        yield fault("admin-key", "a key is given to users as well; an admin key must be another one")
    for device, limit in settings.device_limit.items():
        if limit <= settings.margin(device):
            yield fault(
                "device-limit",
                f"{device}={limit // MIB} leaves nothing beside the margin of {settings.margin(device) // MIB} MiB;"
                " raise it or lower --models-memory-margin",
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`: a loopback address or name, or a socket file."""
    name = host.strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith((".localhost", ".sock"))


def hub_cache(environ: Mapping[str, str]) -> str:
    """Where the hub library keeps repositories, by its own variables."""
    if environ.get("HF_HUB_CACHE"):
        return environ["HF_HUB_CACHE"]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return f"{environ.get('HF_HOME') or f'{cache}/huggingface'}/hub"


# Keys


@dataclass(frozen=True, kw_only=True)
class Key:
    """Who may ask. The key itself is not kept."""

    name: str = ""
    """For logs."""
    digest: bytes = dataclasses.field(repr=False)
    """SHA-256."""
    admin: bool = False
    models: tuple[str, ...] = ()
    """Globs of model names; empty: all."""
    max_concurrent: int = 0
    """Requests at once; 0: no limit."""


def parse_keys(text: str, admin: bool, *, file: str = "") -> tuple[Key, ...]:
    """The keys of a key file: `KEY [name=N] [admin] [models=GLOB,GLOB] [max-concurrent=N]` a line, `#` comments.

    KEY may be `sha256:<hex>`; `admin`: every key of the file is an admin key. Raises ConfigError with a line for
    each fault, none of which repeats a key.
    """
    keys: list[Key] = []
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
        raise ConfigError(problems)
    return tuple(keys)


def configured_keys(settings: Settings, *, user_file: str = "", admin_file: str = "") -> tuple[Key, ...]:
    """All keys of a router, from its flags and the text of its two key files. Raises ConfigError."""
    keys = [
        *(Key(digest=digest(key)) for key in settings.api_key),
        *(Key(digest=digest(key), admin=True) for key in settings.admin_key),
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
        raise ConfigError(problems)
    return tuple(keys)


def digest(key: str) -> bytes:
    """What is kept and compared in place of a key."""
    return hashlib.sha256(key.encode()).digest()


def _key(words: list[str], admin: bool) -> Key:
    secret, *rest = words
    hashed = _DIGEST.fullmatch(secret)
    if not hashed and (not _KEY.fullmatch(secret) or secret.startswith("sha256:")):
        raise ValueError("the key must be 1 to 512 ASCII characters without blanks, or sha256: and 64 hex digits")
    fields: dict[str, Any] = {"digest": bytes.fromhex(hashed[1]) if hashed else digest(secret), "admin": admin}
    for word in rest:
        name, has_value, value = word.partition("=")
        if name == "admin" and not has_value:
            fields["admin"] = True
        elif name == "name" and re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", value):
            fields["name"] = value
        elif name == "models" and re.fullmatch(r"[A-Za-z0-9._:/@+*?\[\]!,-]{1,4096}", value):
            fields["models"] = tuple(glob for glob in value.split(",") if glob)
        elif name == "max-concurrent" and re.fullmatch(r"[1-9][0-9]{0,5}", value):
            fields["max_concurrent"] = int(value)
        elif name in {"name", "models", "max-concurrent"}:
            raise ValueError(f"{name}= needs a {'number of 1 or more' if name == 'max-concurrent' else 'plain value'}")
        else:
            raise ValueError("after the key only name=, admin, models= and max-concurrent= may stand")
    if fields["admin"] and fields.get("models"):
        raise ValueError("an admin key may use every model; remove models= or admin")
    return Key(**fields)
