"""The commands: `router` serves, `router check` reads presets, `router estimate` estimates a model's memory.

Heavy modules are imported late, so that `--help` is quick.
"""

import gc
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from router import __version__
from router.cli import options
from router.cli.options import command_params, given_options, with_names
from router.cli.worker_packages import missing_packages
from router.config import effective as written
from router.config import preset_keys, settings, xdg
from router.config.ini import Problem
from router.config.option_types import nearest, shown
from router.config.presets import MODEL_REPO, Preset, hub_name
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.errors import ConfigError, RouterError
from router.store.catalogue import AddedModels, find_preset, for_all, load_catalogue, read_keys

OK, FAULTS, USAGE, UNREACHABLE, TOO_LARGE, INTERRUPTED = 0, 1, 2, 3, 4, 130
STDERR = 2  # its file descriptor
SCHEMA = 1  # version of JSON documents on stdout
_ABOUT = "Serve many language models from one address, one worker process per model, and evict models by memory."
_EXAMPLES = (
    ("router org/name", "serve a model of the Hugging Face hub"),
    ("router DIR DIR --ctx-size 8192", "serve models in folders, with keys of models as options"),
    ("router --models-preset FILE", "serve the models of a file, each loaded by its first request"),
    ("router run org/name", "chat with a model in the terminal"),
)
_FURTHER = (
    "`router serve --help` lists all options and their variables.",
    "`router --help-model-keys` lists the keys of models, which are options as well.",
)
_VARIABLES = """\
Every option is also an environment variable: ROUTER_ and its name in capitals (--models-max: ROUTER_MODELS_MAX). Where
llama-server has the same option, its variable (shown below) is read next. A flag takes precedence over both.
"""
# Options that decide which presets exist and whether they are valid.
READ = frozenset({"models-preset", "models-dir", "models-cache", "demo", "strict-presets", "swap-patience"})
CHECKED = READ | {"model", "model-names", "hf-repo", "default-model"}
# Options that decide an estimate.
WEIGHED = READ | {"offline", "hf-token", "state-dir", "fork-server", "prepare", "models-memory-margin", "device-limit"}
# Options that decide which snapshot is converted, and where the converted copy is stored.
PREPARED = READ | {"offline", "hf-token", "state-dir"}
DOWNLOADED = PREPARED | {"model", "model-names", "hf-repo", "prepare"}
# Decides only whether the min-residency of a preset is valid: `check` shows it, the commands for one model accept it.
VALIDATES = frozenset({"swap-patience"})
# Commands of other programs, and what to use instead. Each would be a repository's name.
_INSTEAD = {
    **dict.fromkeys(("list", "ls", "models", "show", "status"), "Use `router ps --all`."),
    "config": "Use `router check --effective`.",
    "help": "Use `router --help`.",
    **dict.fromkeys(("rm", "delete"), "Send DELETE /api/delete to the running router."),
    "start": "Use `router serve`.",
    "version": "Use `router --version`.",
    "load": "The first request for a model loads it, and so does POST /models/load of the running router.",
    "pull": "Use `router download`.",
    "stop": "Send POST /models/unload to the running router.",
    "unload": "Send POST /models/unload to the running router.",
}
DOWNLOAD_ONLY = "router.download_only"  # in the context of a command: the flag stood before it
_download_only = click.option(
    "--download-only", is_flag=True, help="Download the files of the models and exit; see `router download --help`."
)
EVERYDAY = (
    "model", "hf-repo", "models-preset", "models-dir", "demo", "models-memory-margin", "models-max", "host", "port",
    "api-key-file", "allowed-hosts", "offline", "log-level",
)  # fmt: skip


class _Command(options.Command):
    """A command that prints errors of the router, as a JSON document with --json."""

    def invoke(self, ctx: click.Context) -> Any:
        as_json = ctx.params.get("as_json", False)
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            if as_json:
                _print_document({"error": {"code": "configuration", "message": "; ".join(error.problems)}})
            else:
                click.echo("\n".join(error.problems), err=True)
            return USAGE
        except RouterError as error:
            if as_json:
                _print_document({"error": {"code": f"{ctx.info_name}_failed", "message": str(error)}})
            else:
                click.echo(f"router: {error}", err=True)
            return FAULTS


class _Router(_Command, click.Group):
    """The command group: it serves unless a command is named. `router org/name` is `router serve org/name`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        if "/" not in name and not Path(name).exists():
            near = nearest(name, self.commands, cutoff=0.7)
            hint = _INSTEAD.get(name) or (f"Did you mean {near}?" if near else "")
            # The help of `serve` for an unknown word would look as if there were such a command.
            asks = name.isalnum() and bool({"-h", "--help"} & set(args))
            if hint or asks:
                raise click.UsageError(f"{shown(name)} is no command and no model. {hint}".rstrip(), ctx)
        return "serve", self.commands["serve"], args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[MODEL ...]", "| COMMAND [ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, commands and the options of every day; `router serve --help` has all of them."""
        with formatter.section("Examples"):
            formatter.write_dl(_EXAMPLES)
        self.format_commands(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl([options.short_row(settings.BY_FLAG[flag]) for flag in EVERYDAY])
        with formatter.indentation():
            formatter.write_paragraph()
            for line in _FURTHER:
                formatter.write_text(line)


def _is_model(name: str) -> bool:
    """True if an argument of `router check` is a model, and no preset file."""
    if os.path.exists(name):
        return os.path.isdir(name)
    return name.startswith("demo:") or (MODEL_REPO.fullmatch(hub_name(name)) is not None and not name.endswith(".ini"))


@click.group(
    cls=_Router, invoke_without_command=True, params=command_params(), help=_ABOUT,
    context_settings={
        "help_option_names": ["-h", "--help"], "max_content_width": 100,
        "token_normalize_func": lambda token: token.replace("_", "-"),  # EricLLM: --max_prompts
    },
)  # fmt: skip
@click.version_option(__version__, prog_name="router")
@_download_only
@click.pass_context
def cli(ctx: click.Context, /, download_only: bool, **params: Any) -> int | None:
    given = {name: value for name, value in params.items() if value is not None and value != ()}
    if ctx.invoked_subcommand is not None:
        if download_only and ctx.invoked_subcommand != "serve":
            raise click.UsageError(f"--download-only does not belong to `{ctx.invoked_subcommand}`.", ctx)
        ctx.obj, ctx.meta[DOWNLOAD_ONLY] = given, download_only
        return None
    return _download(given) if download_only else _serve(given)


@cli.command(
    cls=_Command, params=[click.Argument(["models"], nargs=-1, metavar="[MODEL]..."), *command_params()],
    help="Start the server; the same as `router` without a command. Each MODEL, a folder or org/name of the hub, is"
    f" loaded at start.\n\n{_VARIABLES}",
    short_help="Start the server; the same as `router` without a command.",
)  # fmt: skip
@_download_only
@click.pass_context
def serve(ctx: click.Context, /, models: tuple[str, ...], download_only: bool, **params: Any) -> int:
    given = with_names(given_options(ctx, params), models)
    return _download(given) if download_only or ctx.meta.get(DOWNLOAD_ONLY) else _serve(given)


@cli.command(
    "download", cls=_Command,
    params=[
        click.Argument(["models"], nargs=-1, metavar="[MODEL]..."),
        *command_params(only=DOWNLOADED, hidden=VALIDATES),
    ],
    help="Download and convert the files of models as their first load would, without a server; for container builds."
    " Without a MODEL: all models of --models-preset. `router ... --download-only` does the same for the command line"
    " of a server. Prints each model and the folder that it is loaded from. Exits with 1 if a model fails.",
    short_help="Download the files of models, without a server.",
)  # fmt: skip
@click.pass_context
def download_command(ctx: click.Context, /, models: tuple[str, ...], **params: Any) -> int:
    return _download(with_names(given_options(ctx, params), models))


def _of_running_router(command: Callable[..., Any]) -> Callable[..., Any]:
    address = click.option(
        "--url", default=options.URL, envvar="ROUTER_URL", show_default=True, metavar="URL",
        help="Address of the router, or the path of its socket; or ROUTER_URL.",
    )  # fmt: skip
    return address(
        click.option(
            "--api-key", default="", envvar="ROUTER_API_KEY", metavar="KEY",
            help="API key of the router; or ROUTER_API_KEY.",
        )(command)
    )  # fmt: skip


class _Run(click.Command):
    """Chat. Click alone would read -hf and -hft as -h and print the help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_long(word) for word in args])


def _long(word: str) -> str:
    """A word of the command line, with the long name if it is an option such as -hf or -hft."""
    name, equals, value = word.removeprefix("-").partition("=")
    if not word.startswith("-hf"):
        return word
    return f"--{settings.SPELLINGS[name].flag if name in settings.SPELLINGS else name}{equals}{value}"


@cli.command(
    "run",
    cls=_Run,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    help="Chat with MODEL in the terminal. A running router is used if it lists the model. Otherwise one is started for"
    " the chat, with OPTIONS of `router serve`, such as --ctx-size 4096.",
    short_help="Chat with a model in the terminal.",
)
@_of_running_router
@click.argument("model")
@click.argument("further", metavar="[OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
def run_command(url: str, api_key: str, model: str, further: tuple[str, ...]) -> int:
    from router.cli import chat  # Imported late: it brings the HTTP client.

    if any(word.partition("=")[0] == "--url" for word in further):  # no option of `router serve`, which would refuse it
        raise click.UsageError("--url stands before MODEL: router run --url URL MODEL.", click.get_current_context())
    try:
        return chat.run(model, further, url, api_key.partition(",")[0])
    except chat.ChatError as error:
        if str(error):
            click.echo(f"router run: {error}", err=True)
        return FAULTS


@cli.command(
    help="Show the loaded models of a running router, their memory and the stages of each load. Exits with 3 if"
    " none answers.",
    short_help="Show the loaded models of a running router.",
)
@_of_running_router
@click.option("--all", "everything", is_flag=True, help="Also show models that are not loaded.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON answer of the router.")
def ps(url: str, api_key: str, everything: bool, as_json: bool) -> int:
    from router.cli import client  # Imported late: it brings the HTTP client.

    try:
        models = client.models(url, api_key.partition(",")[0])
    except client.RouterUnreachable as failed:
        click.echo(f"router ps: {failed}", err=True)
        return UNREACHABLE
    table = client.processes(models, now=time.time(), everything=everything)
    click.echo(json.dumps(models, indent=1) if as_json else table)
    return OK


@cli.command(
    cls=_Command,
    params=[
        click.Argument(["names"], nargs=-1, metavar="[FILE|MODEL]..."),
        *command_params(hidden=settings.BY_FLAG.keys() - CHECKED),
    ],
    help="Read presets as the server does, start nothing, and report every fault with file and line. Exits with 1 if"
    " there is one. FILE stands for --models-preset; a folder or org/name is a MODEL as for `router serve`. All options"
    " of `router serve` may be given, and are checked.",
    short_help="Read presets as the server does and report every fault.",
)
@click.option("--effective", is_flag=True, help="Show every setting of every model and its source.")
@click.option(
    "--memory",
    is_flag=True,
    help="Estimate each model whose files are here. Report those that do not fit on an empty device, with the settings"
    " that would fit, and those whose cache the engine does not support. Exits with 4 if there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def check(
    ctx: click.Context, /, names: tuple[str, ...], effective: bool, memory: bool, as_json: bool, **params: Any
) -> int:
    from router.cli import check as checks  # Imported late: it reads checkpoints.
    from router.cli import estimate  # Imported late: it reads devices.

    if names[:1] == ("serve",):  # in the command line of the server
        names = names[1:]
    files = [name for name in names if not _is_model(name)]
    if len(files) > 1:
        raise click.UsageError(f"{' and '.join(files)}: one file of presets at a time; check each alone.", ctx)
    given, models = options.split(
        with_names(given_options(ctx, params), tuple(name for name in names if name not in files))
    )
    if files:
        given["models-preset"] = files[0]
    parsed = _settings(given)
    loaded = load_catalogue(parsed, models, os.environ)
    if lacks := _lacking_packages(loaded):
        loaded = replace(loaded, warnings=(*loaded.warnings, Problem("", 0, "", "", lacks)))
    loaded = checks.with_load_faults(loaded, parsed.hub_cache, strict=parsed.strict_presets)
    document, text = checks.document(loaded, effective=effective), checks.text(loaded, effective=effective)
    misfits: dict[str, str] = {}
    if effective:
        document["options"] = written.options(parsed)
    warnings = estimate.unused_placement(loaded, os.environ)
    warnings += map(str, checks.lacking_libraries(loaded, parsed.hub_cache))  # of this machine, too
    if memory and not loaded.problems:
        machine = estimate.Machine(parsed, os.environ, xdg.state(parsed.state_dir))
        misfits, further = estimate.check(loaded, machine)
        warnings = list(dict.fromkeys([*warnings, *further]))
        document["does_not_fit"] = misfits
    document["placement_warnings"] = warnings
    text = "\n".join([*misfits.values(), *(f"warning: {each}" for each in warnings), text])
    if as_json:
        _print_document(document)
    else:
        click.echo(text)
    return FAULTS if loaded.problems else TOO_LARGE if misfits else OK


@cli.command(
    "estimate",
    cls=_Command,
    params=[click.Argument(["model"]), *command_params(only=WEIGHED, hidden=VALIDATES)],
    help="Estimate the memory of a model by segment and device, without a server. MODEL is a name from the presets,"
    " a folder, or a repository of the hub, of which only headers are read. Preset keys may be given as options, as in"
    " --ctx-size 32768. Exits with 4 if the model does not fit on an empty device.",
    short_help="Estimate the memory of a model, without a server.",
)
@click.option(
    "--exact", is_flag=True,
    help="Compute the exact estimate in a worker process (some seconds), whatever was learned. Needs the files.",
)  # fmt: skip
@click.option(
    "--forget",
    is_flag=True,
    help="First drop what was learned of the model's memory in earlier loads. A running router forgets it, too. A"
    " loaded worker records its memory again when it stops, so unload the model first.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def estimate_command(ctx: click.Context, /, model: str, exact: bool, forget: bool, as_json: bool, **params: Any) -> int:
    from router.cli import estimate, estimate_report  # Imported late: they read devices.

    parsed, preset = _choose(ctx, params, model)
    machine = estimate.Machine(parsed, os.environ, xdg.state(parsed.state_dir))
    report = estimate.report(preset, machine, exact=exact, forget=forget)
    if as_json:
        _print_document(estimate_report.document(report))
    else:
        click.echo(estimate_report.text(report))
    if not preset.python and (lacks := missing_packages()):
        click.echo(f"warning: {lacks}", err=True)
    return OK if report.fits else TOO_LARGE


@cli.command(
    "prepare",
    cls=_Command,
    params=[click.Argument(["model"]), *command_params(only=PREPARED, hidden=VALIDATES)],
    help="Convert a model once for faster loads, without a server. MODEL is a name from the presets,"
    " a folder, or a repository in the hub cache. Exits with 0 if there is nothing to convert, with 1 if the conversion"
    " fails.",
    short_help="Convert a model once for faster loads.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def prepare_command(ctx: click.Context, /, model: str, as_json: bool, **params: Any) -> int:
    from router.cli.download import prepare  # Imported late: it reads checkpoints.

    parsed, preset = _choose(ctx, params, model)
    prepared = prepare(preset, parsed, os.environ, state=xdg.state(parsed.state_dir))
    if as_json:
        _print_document({**asdict(prepared), "converted": prepared.is_converted})
    else:
        click.echo(prepared)
    return OK


def _choose(ctx: click.Context, params: Mapping[str, Any], name: str) -> tuple[Settings, Preset]:
    """The settings, and the model that a command names. Prints the warnings about it.

    Raises ConfigError.
    """
    given, models = options.split(given_options(ctx, params))
    parsed = _settings(given)
    loaded = load_catalogue(parsed, for_all(models), os.environ)
    _raise(loaded.problems)
    preset, warnings = find_preset(name, loaded, models, os.environ)
    _warn(warnings)
    return parsed, preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0, 1 faults or failure, 2 usage or configuration, 3 no router answers, 4
    the model does not fit, 130 interrupted."""
    _open_standard_streams()
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="router", standalone_mode=False)
    except click.ClickException as error:
        (_better(error) if isinstance(error, click.NoSuchOption) else error).show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("router: interrupted", err=True)
        return INTERRUPTED
    except OSError as failed:  # For example a full disk.
        click.echo(f"router: {failed.strerror or failed}{f': {failed.filename}' if failed.filename else ''}", err=True)
        sys.stdout = io.StringIO()  # The interpreter must not try again to write at its end.
        return FAULTS
    return code if isinstance(code, int) else OK


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed (`router <&-`, some init systems). Sockets would get their
    numbers, and libuv ends the process when it closes one of these."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)


def _better(error: click.NoSuchOption) -> click.UsageError:
    """The same error with its reason, or with the most similar option."""
    name = error.option_name
    if name.lstrip("-") in settings.UNAVAILABLE:
        instead = settings.UNAVAILABLE[name.lstrip("-")] or "remove it"
        return click.NoSuchOption(name, f"{name} is not offered by this version; {instead}.", ctx=error.ctx)
    if name.lstrip("-").removeprefix("no-") in settings.SPELLINGS and error.ctx is not None:
        return options.misplaced(name, error.ctx)
    near = preset_keys.nearest_key(name, settings.BY_FLAG)
    own = {spelling for param in error.ctx.command.params for spelling in param.opts} if error.ctx else set()
    if f"--{near}" not in own:  # Commands for a running router have few options and would refuse this one.
        near = nearest(name, own).lstrip("-")
    return click.NoSuchOption(name, possibilities=[f"--{near}"] if near else [], ctx=error.ctx)


def _serve(given: Mapping[str, Any]) -> int:
    gc.disable()  # Objects made before serving stay for the whole run: a search for garbage finds nothing.
    try:
        return _load_and_serve(given)
    finally:
        gc.enable()


def _load_and_serve(given: Mapping[str, Any]) -> int:
    parsed, models, loaded = _load(given)
    read_keys(parsed)
    if lacks := _lacking_packages(loaded):
        if not any(preset.python for preset in loaded.presets.values()):
            raise ConfigError(lacks)
        click.echo(f"warning: {lacks}", err=True)
    first = [loaded]

    def load(added: AddedModels) -> LoadedPresets:
        """The presets just read, at the first call; after that the current ones."""
        return first.pop() if first else load_catalogue(parsed, models, os.environ, added)

    from router.cli.serve import run  # Imported late: it brings the HTTP server, which no other command needs.

    return run(parsed, load, lambda: read_keys(parsed))


def _load(given: Mapping[str, Any]) -> tuple[Settings, dict[str, str], LoadedPresets]:
    """The settings, the keys of models among the flags, and the presets. Prints warnings. Raises ConfigError."""
    flags, models = options.split(given)
    parsed = _settings(flags)
    loaded = load_catalogue(parsed, models, os.environ)
    _warn(loaded.warnings)
    _raise(loaded.problems)
    return parsed, models, loaded


def _lacking_packages(loaded: LoadedPresets) -> str:
    """The packages that the workers of some models lack; empty if all models have an interpreter of their own."""
    presets = loaded.presets.values()
    return "" if presets and all(preset.python for preset in presets) else missing_packages()


def _download(given: Mapping[str, Any]) -> int:
    from router.cli.download import download  # Imported late: it reads checkpoints.

    parsed, _, loaded = _load(given)
    ids = loaded.named or [id for id, preset in loaded.presets.items() if preset.source == "preset"]
    if not ids:
        raise ConfigError("no model is named; write router download org/name, or --models-preset FILE")
    code = OK
    for preset in (loaded.presets[id] for id in ids):
        try:
            folder = download(preset, parsed, os.environ, state=xdg.state(parsed.state_dir))
        except RouterError as error:
            click.echo(f"router: {error}", err=True)
            code = FAULTS
        else:
            click.echo(f"{preset.id}: {folder}")
    return code


def _settings(flags: Mapping[str, str]) -> Settings:
    """Raises ConfigError."""
    parsed, problems = settings.parse(flags, os.environ)
    _raise(problems)
    return parsed


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(*map(str, problems))


def _warn(warnings: Sequence[Problem]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _print_document(content: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"schema": SCHEMA, **content}, ensure_ascii=False, indent=1))
