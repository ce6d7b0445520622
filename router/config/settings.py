"""The options of the router. Each is declared once, as a field of Settings.

A flag takes precedence over `ROUTER_<FLAG>`, then come llama-server's variable and the default. Pure functions; the
environment and the text of key files are arguments.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from router.config.ini import Problem
from router.config.option_types import (
    Flag,
    Groups,
    Integer,
    Kind,
    Memory,
    MemoryByDevice,
    Names,
    OneOf,
    Seconds,
    Text,
    declared,
    shown,
)
from router.planner.ledger import DeviceShare
from worker.protocol.memory import MIB

MAX_BUFFERED = 512 * MIB  # bytes of all request bodies in memory, and so of each; more are rejected
_TLS = "a proxy in front of the router offers TLS"
# Options of other servers that this version does not have, with what to do instead (empty: remove it). Without this
# table they would be reported as unknown keys of models.
UNAVAILABLE: Mapping[str, str] = {
    "cluster": "", "log-file": "redirect stderr", "secure-mode": "", "worker-port-range": "",
    "config-file": "give its settings as variables, SERVING_NAME",
    "ssl-cert-file": _TLS, "ssl-key-file": _TLS,
    "models-memory-max": "--models-memory-margin keeps memory free on a device, --device-limit lowers its total",
}  # fmt: skip
# The variable of llama-server that turns a switch off with any value.
_POSITIVE, NEGATIVE = "LLAMA_ARG_", "LLAMA_ARG_NO_"
KEY = re.compile(r"[\x21-\x7e]{1,512}")
_QUADS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_LOAD_MODELS = "SERVING_LOAD_MODELS"
ALL = "ALL"  # in LMI's load_models: the models of the model store
# An item of LMI's load_models; the brackets may be missing if there is a colon, or before a path or a URL of a file.
_LMI_MODEL = re.compile(r"(?:\[([^=/\]]*)\]|([^=/\[\]]*:[^=/\[\]]*|[^=/:\[\]]*(?==(?:file:|\.{0,2}/))))=(.+)")
_FILE_URL = re.compile(r"^file:(//)?")
_IN_BRACKETS = re.compile(r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]")  # an IPv6 address, and no JSON list
_URL_OR_PORT = re.compile(r"[a-z]+://.*|(?:\[.*\]|[^:/]*):[0-9]*")  # in place of an address
_KEYS_NEEDED = "give --api-key-file, or --allow-unauthenticated"


@dataclass(frozen=True)
class _Secret(Kind):
    """One API key, or several separated by commas. Messages never contain a key."""

    many: bool = True
    hint: str = "KEY"

    def read(self, text: str) -> Any:
        items = [item.strip() for item in (text.split(",") if self.many else [text]) if item.strip()]
        if not items or not all(KEY.fullmatch(item) for item in items):
            self.fail("a key must be 1 to 512 ASCII characters without blanks")  # click would repeat the value
        return tuple(items) if self.many else items[0]

    def write(self, value: Any) -> str:
        return "***" if value else ""


@dataclass(frozen=True)
class _Models(Names):
    """Names of models, also as LMI's load_models has them (`lmi_model`)."""

    def read(self, text: str) -> tuple[str, ...]:
        if text.strip().upper() == ALL:
            return (ALL,)
        is_json = text.lstrip().startswith('["')
        items = super().read(text) if is_json else tuple(item.strip() for item in text.split(",") if item.strip())
        found = [match for match in map(_LMI_MODEL.fullmatch, items) if match]
        for match in found:
            engine = [*(match[1] or match[2]).split(":"), "", ""][2]
            if engine.casefold() not in ("", "python", "mpi"):
                self.fail(f"{shown(engine)} is an engine that is not offered; remove it")
        if not found:
            items = super().read(text)
        return tuple(dict.fromkeys(_FILE_URL.sub("", item) for item in items))


def lmi_model(text: str) -> tuple[tuple[str, ...], str]:
    """Return the names and the model of an item of LMI's load_models, `name:version:engine:devices=MODEL`, perhaps in
    brackets: `name` and `name:version`. Any other text is a model without names."""
    found = _LMI_MODEL.fullmatch(text)
    if not found:
        return (), text
    name, version = [*(found[1] or found[2]).split(":"), ""][:2]
    names = (name, f"{name}:{version}") if version else (name,)
    return names if name else (), _FILE_URL.sub("", found[3])


@dataclass(frozen=True)
class _Addresses(Text):
    """Addresses, separated by commas. An IPv6 address may be in brackets, as in a URL."""

    hint: str = "ADDRESS"

    def read(self, text: str) -> str:
        return _without_brackets(text)


@dataclass(frozen=True)
class _Hosts(Names):
    """Names of hosts. An IPv6 address may be in brackets, as in a URL."""

    pattern: str = r"\*|(?:\*\.)?[A-Za-z0-9.-]+|[0-9A-Fa-f:.]+"
    complaint: str = "is no host name"

    def read(self, text: str) -> tuple[str, ...]:
        return super().read(_without_brackets(text))


def _without_brackets(text: str) -> str:
    """Addresses and names, separated by commas, with IPv6 addresses without brackets. Raises click.BadParameter for a
    URL or a port."""
    for item in text.split(","):
        if _URL_OR_PORT.fullmatch(item.strip().lower()):
            raise click.BadParameter(f"{shown(item.strip())} is more than a name or address; the port is --port")
    return _IN_BRACKETS.sub(r"\1", text)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of the router: a flag, its environment variables and its field of Settings."""

    flag: str  # without dashes
    kind: Kind
    group: str
    help: str
    also: tuple[str, ...] = ()  # other flags, with dashes
    env: tuple[str, ...] = ()  # variables that are read after ROUTER_<FLAG>
    unset: str = ""  # description of the default, if the value itself does not show it

    @property
    def field(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables, the strongest first. As in llama-server, `LLAMA_ARG_NO_X` is stronger than `LLAMA_ARG_X`."""
        negative = [name.replace(_POSITIVE, NEGATIVE) for name in self.env if self.is_flag and _POSITIVE in name]
        return ("ROUTER_" + self.field.upper(), *negative, *self.env)

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)


_FILE, _FOLDER = Text("FILE"), Text("DIR")
MODELS, MEMORY, HTTP, ACCESS, QUEUE, LOGS = "Models", "Memory", "HTTP", "Access", "Queue", "Logs"
GROUPS = (MODELS, MEMORY, HTTP, ACCESS, QUEUE, LOGS)


def option(default: Any, kind: Kind, group: str, help: str, **facts: Any) -> Any:
    """Declare a field of Settings as an option. `facts`: further fields of `Option`; the flag is the field's name."""
    return declared(default, shown=not isinstance(kind, _Secret), kind=kind, group=group, help=help, **facts)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one router, and the only declaration of its options. Bytes are int, times are float seconds."""

    # fmt: off
    model: tuple[str, ...] = option((), _Models(hint="MODEL"), MODELS,
            "folder or org/name of a model to load at start; repeatable; `router MODEL ...` does the same",
            unset="none", also=("-m", "--models", "--model-path", "--model-id"),
            env=("LLAMA_ARG_MODEL", "OPTION_MODEL_ID", "HF_MODEL_ID", "OPTION_MODEL", _LOAD_MODELS))
    hf_repo: tuple[str, ...] = option((), Names(hint="org/name[:revision]"), MODELS,
            "repository of the hub to load at start; repeatable", unset="none", also=("-hf", "-hfr"),
            env=("LLAMA_ARG_HF_REPO",))
    model_names: tuple[tuple[str, ...], ...] = option((), Groups(), MODELS,
            "other names of a model named at start; repeat it once per model, in their order", unset="none",
            also=("--model-name",))  # as in FastChat's documents: its parser completes options
    models_preset: str = option("", _FILE, MODELS, "INI file of models", unset="none", env=("LLAMA_ARG_MODELS_PRESET",))
    models_dir: str = option("", _FOLDER, MODELS, "folder of models: each folder in it is one", unset="none",
            also=("--model-store",), env=("LLAMA_ARG_MODELS_DIR", "SERVING_MODEL_STORE"))
    models_cache: bool | None = option(None, Flag(), MODELS, "list the complete models of the Hugging Face cache",
            unset="on; off beside --model, --hf-repo and --demo")
    demo: bool = option(False, Flag(), MODELS,
            "serve the built-in demo models, in 1250 MiB of main memory; as a variable, only if no model is named")
    models_autoload: bool = option(True, Flag(), MODELS, "load a model when a request needs it",
            env=("LLAMA_ARG_MODELS_AUTOLOAD",))
    models_watch: bool = option(False, Flag(), MODELS, "reload when the file or the folder of models changes")
    default_model: str = option("", Text("ID"), MODELS, "model of requests that name none", unset="none")
    unknown_model: str | None = option(None, OneOf(("reject", "default")), MODELS,
            "treatment of requests for an unknown model", unset="reject; default if started with one model by name")
    strict_presets: bool = option(False, Flag(), MODELS, "treat options without meaning here as errors")
    offline: bool = option(False, Flag(), MODELS, "download nothing", env=("LLAMA_ARG_OFFLINE", "LLAMA_OFFLINE"))
    hf_token: str = option("", _Secret(many=False), MODELS, "for downloads only", unset="none", also=("-hft",),
            env=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    state_dir: str = option("", _FOLDER, MODELS, "estimates, converted snapshots, weights of demo models",
            unset="the platform's")
    runtime_dir: str = option("", _FOLDER, MODELS, "sockets of the workers", unset="the platform's")
    fork_server: bool = option(True, Flag(), MODELS,
            "fork workers from a process that has imported all libraries; off: each worker imports them, 3 s")
    prepare: bool = option(True, Flag(), MODELS,
            "convert checkpoints once, after a download, not at each load; needs disk space for mixtures of experts")

    models_memory_margin: Mapping[str, int] = option({"": 1024 * MIB}, MemoryByDevice(hint="MiB"), MEMORY,
            "memory to keep free on every device, or cuda:0=2048,cpu=4096; 0: evict by count only",
            env=("LLAMA_ARG_MODELS_MEMORY_MARGIN",))  # "": others
    device_limit: Mapping[str, int | DeviceShare] = option({},
            MemoryByDevice(low=1, named=True, shares=True, hint="DEV=MiB or DEV=90%"), MEMORY,
            "treat a device as smaller than it is: cpu=600, or cuda:0=90%", unset="none")  # by device name
    sleep_memory: int = option(0, Memory(), MEMORY,
            "main memory, in MiB, for the weights of evicted models", unset="0: none")
    models_max: int | None = option(None, Integer(0), MEMORY, "workers at once; 0: as memory allows",
            unset="0; 4 if the margin is 0",  # None: see `workers_at_once`
            also=("--limit-worker-concurrency", "--limit"), env=("LLAMA_ARG_MODELS_MAX",))

    host: str = option("127.0.0.1", _Addresses(), HTTP,
            "addresses to listen on, separated by commas, or a path ending in .sock", env=("LLAMA_ARG_HOST",))
    port: int = option(8080, Integer(0, 65535), HTTP, "0: any free one", env=("LLAMA_ARG_PORT",))
    api_prefix: str = option("", Text("/PATH", r"(/[A-Za-z0-9._~-]+)+", "is no path such as /llm"), HTTP,
            "prefix of every path, for a server behind a proxy", unset="none", env=("LLAMA_ARG_API_PREFIX",))
    lmi_management: bool = option(False, Flag(), HTTP,
            "serve LMI's management at /models as well, in place of llama-server's list and download there")
    slots: bool = option(True, Flag(), HTTP, "offer GET /slots, which shows the tasks in the batches",
            env=("LLAMA_ARG_ENDPOINT_SLOTS",))
    timeout: float = option(3600.0, Seconds(off=0.0), HTTP, "time limit of one request; 0: none", also=("-to",),
            env=("LLAMA_ARG_TIMEOUT",))
    body_timeout: float = option(60.0, Seconds(low=0.1), HTTP, "time limit for the body of a request to arrive")
    write_stall: float = option(30.0, Seconds(low=0.1), HTTP, "time until a client that reads nothing is disconnected")
    max_body_size: int = option(64 * MIB, Memory(low=1024), HTTP, "largest body of one request, in MiB")
    stream_commit_seconds: float = option(10.0, Seconds(), HTTP, "time until a waiting stream gets its status line")
    sse_ping_interval: float = option(15.0, Seconds(low=0.1, off=-1.0), HTTP,
            "time between comments in a silent stream; -1: off", env=("LLAMA_ARG_SSE_PING_INTERVAL",))
    cors_origins: tuple[str, ...] = option((),
            Names(r"\*|localhost|https?://[^/\s]+", "is no origin such as http://host:80"), HTTP,
            "origins of pages that may call this server", unset="none", also=("--allowed-origins",),
            env=("LLAMA_ARG_CORS_ORIGINS", "SERVING_CORS_ALLOWED_ORIGIN"))
    strict_fields: bool = option(False, Flag(), HTTP, "reject unknown request fields")

    api_key: tuple[str, ...] = option((), _Secret(), ACCESS, "API keys for clients, separated by commas", unset="none",
            also=("--api-keys",), env=("LLAMA_API_KEY", "LLAMA_ARG_API_KEY"))
    api_key_file: str = option("", _FILE, ACCESS, "file of API keys, one a line, mode 0600", unset="none",
            env=("LLAMA_ARG_API_KEY_FILE",))
    admin_key: tuple[str, ...] = option((), _Secret(), ACCESS, "keys for loads, unloads and /router/*", unset="none")
    admin_key_file: str = option("", _FILE, ACCESS, "file of admin keys", unset="none")
    allow_unauthenticated: bool = option(False, Flag(), ACCESS, "allow other machines to connect without a key")
    metrics_public: bool = option(False, Flag(), ACCESS, "allow GET /metrics without a key")
    registration_dirs: tuple[str, ...] = option((), Names(r"/.*", "is no absolute path"), ACCESS,
            "folders inside which calls of LMI's API may register models and adapters", unset="none")
    allowed_hosts: tuple[str, ...] = option((), _Hosts(), ACCESS, "allowed names in Host headers; *: any", unset="none")

    queue_size: int = option(4000, Integer(1), QUEUE, "most waiting requests of all models")
    queue_timeout: float = option(300.0, Seconds(low=0.1), QUEUE, "longest wait for memory")
    swap_patience: float = option(10.0, Seconds(), QUEUE,
            "wait of a request before a busy worker past its min-residency is drained")
    drain_timeout: float = option(30.0, Seconds(), QUEUE,
            "time to finish running requests after an unload, a changed preset or a shutdown")
    evict_timeout: float = option(-1.0, Seconds(off=-1.0), QUEUE,
            "time to finish running requests at an eviction; off: no limit", unset="off")

    log_level: str = option("info", OneOf(("debug", "info", "warning", "error"), {"warn": "warning"}), LOGS,
            "lowest level of lines to write")
    log_format: str = option("text", OneOf(("text", "json")), LOGS,
            "format of log lines on stderr; messages of the start are text")
    access_log: str = option("all", OneOf(("all", "errors", "off")), LOGS, "which requests to log")
    # fmt: on

    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)  # flag or variable, by flag
    # The folder of downloaded repositories. Not an option, because all programs that use the hub share its variables.
    hub_cache: str = ""

    @property
    def names_models(self) -> bool:
        """True if the options name the models to serve: by name, by a file or by a folder."""
        return bool(self.model or self.hf_repo or self.models_preset or self.models_dir)

    @property
    def serves_demo(self) -> bool:
        return self.demo and not self.names_models

    @property
    def lists_cache(self) -> bool:
        """True if the models of the hub cache are served, too."""
        if self.models_cache is not None:
            return self.models_cache
        return not (self.model or self.hf_repo or self.serves_demo)

    @property
    def workers_at_once(self) -> int:
        """The most workers at once; 0: no limit. Without a margin memory does not limit them, so the default is 4."""
        if self.models_max is not None:
            return self.models_max
        return 0 if self.limits_memory else 4

    @property
    def limits_memory(self) -> bool:
        """False if all margins are 0: then only the number of workers is limited."""
        return any(self.models_memory_margin.values())

    def margin(self, device: str) -> int:
        """Bytes to keep free on a device, by its name."""
        return self.models_memory_margin.get(device, self.models_memory_margin.get("", 0))


# As if the machine had no more main memory, so that every machine shows an eviction. The fork server is charged 430
# MiB, a forked worker 50 to 330 once it is ready, and an executed one 320 more.
DEMO_LIMIT, DEMO_MARGIN = 1250 * MIB, 128 * MIB
OPTIONS = tuple(
    Option(flag=field.name.replace("_", "-"), **field.metadata)
    for field in dataclasses.fields(Settings)
    if field.metadata
)
BY_FLAG: Mapping[str, Option] = {option.flag: option for option in OPTIONS}
# By flag without dashes, other spellings included.
SPELLINGS: Mapping[str, Option] = {
    name.lstrip("-"): option for option in OPTIONS for name in (option.flag, *option.also)
}
BY_VARIABLE: Mapping[str, Option] = {name: option for option in OPTIONS for name in option.variables}


def parse(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Settings, tuple[Problem, ...]]:
    """Read settings from flags (`given`, by name without dashes) and variables. Unusable if there are problems."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for option in OPTIONS:
        text, origin = _source(option, given, environ)
        if not origin:
            continue
        origins[option.flag] = origin
        try:
            values[option.field] = option.kind(text)
        except click.BadParameter as error:
            problems.append(Problem(origin, 0, "", option.flag, error.message))
    margin = values.get("models_memory_margin")
    if margin is not None and "" not in margin:
        values["models_memory_margin"] = {"": 1024 * MIB, **margin}
    settings = Settings(**values, origins=origins, hub_cache=hub_cache(environ))
    if settings.serves_demo:
        small = {"device_limit": {"cpu": DEMO_LIMIT}, "models_memory_margin": {"": DEMO_MARGIN}}
        settings = dataclasses.replace(settings, **(small | values))
    faulty = {problem.key for problem in problems}
    further = [problem for problem in _contradictions(settings, origins) if problem.key not in faulty]
    return settings, (*problems, *further)


def _source(option: Option, given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The text of an option and its origin; both empty if it is not set. An empty variable counts as not set."""
    if option.flag in given:
        return given[option.flag], f"--{option.flag}"
    texts = ((variable_text(name, environ), name) for name in option.variables)
    return next((found for found in texts if found[0]), ("", ""))


def variable_text(name: str, environ: Mapping[str, str]) -> str:
    """The text that a variable gives its option, empty if it is not set: `off` for a negative one with any value, and
    LMI's list of models, which blanks may separate, with commas. NONE there loads no model."""
    text = environ.get(name, "")
    if name == _LOAD_MODELS:
        return "" if text.strip().upper() == "NONE" else ",".join(re.split("[, ]+", text.strip()))
    return "off" if text and name.startswith(NEGATIVE) else text


def _contradictions(settings: Settings, origins: Mapping[str, str]) -> Iterator[Problem]:
    def fault(flag: str, message: str) -> Problem:
        return Problem(origins.get(flag, f"--{flag}"), 0, "", flag, message)

    has_keys = any(flag in origins for flag in ("api-key", "api-key-file", "admin-key", "admin-key-file"))
    hosts = [host.strip() for host in settings.host.split(",")]
    public = [host for host in hosts if not is_local(host)]
    if not all(hosts):
        yield fault("host", "an address is empty; write one, or several with commas")
    elif wrong := next(filter(_QUADS.fullmatch, (host for host in public if not is_address(host))), None):
        yield fault("host", f"{wrong} is no address; write four numbers up to 255, or a name")
    elif public and not has_keys and not settings.allow_unauthenticated:
        yield fault("host", f"{public[0]} is open to other machines; {_KEYS_NEEDED}")
    # A proxy that sends this name lets other machines in, although the router listens on this machine only.
    elif (name := next((name for name in settings.allowed_hosts if not is_loopback(name)), None)) and not (
        has_keys or settings.allow_unauthenticated
    ):
        yield fault("allowed-hosts", f"{name} is a name for other machines; {_KEYS_NEEDED}")
    for flag, models in (("model", settings.model), ("hf-repo", settings.hf_repo)):
        if flag in origins and not models:
            yield fault(flag, "names no model; write a folder or org/name, or remove it")
    if ALL in settings.model and not settings.models_dir:
        yield fault("model", "ALL loads the models of --models-dir; give that as well")
    if origins.get("demo") == "--demo" and settings.names_models:
        yield fault("demo", "models are named as well, and the demo models are not served beside others; remove it")
    named = len(settings.model) - settings.model.count(ALL) + len(settings.hf_repo)
    groups = len(settings.model_names)
    if groups and groups != named:
        yield fault(
            "model-names",
            f"is given {groups} times for {named} model{'s' * (named != 1)} named at start; give it once per model",
        )
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
        if not isinstance(limit, DeviceShare) and limit <= settings.margin(device):
            yield fault(
                "device-limit",
                f"{device}={limit // MIB} leaves nothing beside the margin of {settings.margin(device) // MIB} MiB;"
                " raise it or lower --models-memory-margin",
            )


def is_address(host: str) -> bool:
    """True if `host` is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """True if a server on `host` is reachable from this machine only: loopback, or a socket file."""
    return host.lower().endswith(".sock") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """True if `host` is a name or an address of this machine only."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return "%" not in name and is_address(name) and ipaddress.ip_address(name).is_loopback


def hub_cache(environ: Mapping[str, str]) -> str:
    """The folder in which the hub library keeps repositories, according to its variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return environ[name]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return f"{environ.get('HF_HOME') or f'{cache}/huggingface'}/hub"
