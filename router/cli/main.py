"""The command line: `router` serves, `router check` reads presets, `router estimate` estimates a model's memory.

Options are generated from the tables of `settings` and `presets`. Heavy modules are imported late, so that `--help` is
quick.
"""

import gc
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from router import __version__
from router.cli import client
from router.cli.worker_packages import missing_packages
from router.config import effective as written
from router.config import preset_keys, settings, xdg
from router.config.ini import Problem
from router.config.option_types import Choice, Flag, Integer, Names, Seconds, Strings, nearest, shown
from router.config.preset_keys import MeaninglessOption
from router.config.presets import DEFAULTS, KEYS, REPO, Preset, PresetKey
from router.config.resolve import LoadedPresets
from router.config.settings import Option, Settings
from router.errors import ConfigError, RouterError
from router.registry import worker_groups
from router.store.catalogue import Further, find_preset, for_all, load_catalogue, read_keys, unusable_pickles

OK, FAULTS, USAGE, UNREACHABLE, TOO_LARGE, INTERRUPTED = 0, 1, 2, 3, 4, 130
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
_MODEL_KEYS = """\
Every preset key is also a flag and takes precedence for every model, as in --ctx-size 4096. --help-model-keys lists
the keys.
"""
_KEYS_ABOUT = """\
Keys of a model: in a section [id] of a preset file, in [*] for all models, as a flag (--ctx-size 4096) or as a variable
(ROUTER_CTX_SIZE). Precedence: flag, [id], [*], variable. In brackets: other spellings; default.
"""


# Options that decide which presets exist and whether they are valid.
READ = frozenset({"models-preset", "models-dir", "models-cache", "demo", "strict-presets", "swap-patience"})
CHECKED = READ | {"model", "model-names", "hf-repo", "default-model"}
# Options that decide an estimate.
WEIGHED = READ | {"offline", "hf-token", "state-dir", "fork-server", "prepare", "models-memory-margin", "device-limit"}
# Options that decide which snapshot is converted, and where the converted copy is stored.
PREPARED = READ | {"offline", "hf-token", "state-dir"}
DOWNLOADED = PREPARED | {"model", "model-names", "hf-repo", "prepare"}
REPEATED = frozenset({
    "model", "model-names", "hf-repo", "api-key", "admin-key", "device-limit", "models-memory-margin", "allowed-hosts",
})  # fmt: skip
DOWNLOAD_ONLY = "router.download_only"  # in the context of a command: the flag stood before it
EVERYDAY = (
    "model", "hf-repo", "models-preset", "models-dir", "demo", "models-memory-margin", "models-max", "host", "port",
    "api-key-file", "allowed-hosts", "offline", "log-level",
)  # fmt: skip
NARROW = 70  # columns from which names and texts of options stand side by side


def _as_option(option: Option, *, hidden: bool = False) -> click.Option:
    names = [f"--{option.flag}/--no-{option.flag}"] if option.is_flag else [f"--{option.flag}", *option.also]
    repeats = option.flag in REPEATED
    return click.Option([*names, f"s_{option.field}"], default=None, multiple=repeats, hidden=hidden)


def _model_options() -> Iterable[tuple[str, str, click.Option]]:
    """(parameter, spelling, option) of every preset key and its other spellings. Hidden, since there are hundreds."""
    for number, (name, word) in enumerate(preset_keys.WORDS.items()):
        if name in settings.SPELLINGS:
            continue
        parameter = f"m_{number}"
        dashes = ["-"] if len(name) == 1 else ["--", "-"] if len(name) <= 5 else ["--"]  # llama-server: -np, -ngl
        is_flag = isinstance(word, MeaninglessOption) and word.is_flag
        is_flag = is_flag or (preset_keys.find(name) or preset_keys.Spelling(word, name)).is_flag
        names = [f"{dash}{name}" for dash in dashes]
        if is_flag and len(name) > 1:
            names[0] += f"/--no-{name}"
        repeats = isinstance(word, PresetKey) and isinstance(word.kind, Names | Strings)
        yield parameter, name, click.Option([*names, parameter], is_flag=is_flag, default=None, hidden=True,
                                            multiple=name == "env" or (repeats and not is_flag))  # fmt: skip


_SETTINGS: Mapping[str, tuple[Option, click.Option]] = {
    f"s_{option.field}": (option, _as_option(option)) for option in settings.OPTIONS
}
_MODELS: Mapping[str, tuple[str, click.Option]] = {
    parameter: (name, option) for parameter, name, option in _model_options()
}


class _Command(click.Command):
    """A command whose help groups the router's options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        mine = [_SETTINGS[param.name][0] for param in options if param.name in _SETTINGS and not param.hidden]
        most = 34 if formatter.width > NARROW else formatter.width // 3
        for group in settings.GROUPS:
            rows = [_row(option) for option in mine if option.group == group]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=most)
        with formatter.section("Keys of models"):
            formatter.write_text(" ".join(_MODEL_KEYS.split()))
        others = [param.get_help_record(ctx) for param in options if param.name not in _SETTINGS]
        with formatter.section("Other options"):
            formatter.write_dl([record for record in others if record], col_max=most)


class _Router(_Command, click.Group):
    """The command group: it serves unless a command is named. `router org/name` is `router serve org/name`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        near = "" if "/" in name or Path(name).exists() else nearest(name, self.commands, cutoff=0.7)
        if near:
            raise click.UsageError(f"{shown(name)} is no command and no model. Did you mean {near}?", ctx)
        return "serve", self.commands["serve"], args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[MODEL ...]", "| COMMAND [ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, commands and the options of every day; `router serve --help` has all of them."""
        with formatter.section("Examples"):
            formatter.write_dl(_EXAMPLES)
        self.format_commands(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl([_short_row(settings.BY_FLAG[flag]) for flag in EVERYDAY])
        with formatter.indentation():
            formatter.write_paragraph()
            for line in _FURTHER:
                formatter.write_text(line)


def _row(option: Option) -> tuple[str, str]:
    name = f"--[no-]{option.flag}" if option.is_flag else f"--{option.flag} {_metavar(option)}"
    default = option.unset or option.kind.write(getattr(Settings(), option.field))
    facts = "; ".join([default, *option.env])
    return ", ".join([name, *option.also]), f"{option.help}  [{facts}]"


def _short_row(option: Option) -> tuple[str, str]:
    short = next((f"{name}, " for name in option.also if len(name) <= 3), "")
    name = f"{short}--{option.flag}" + ("" if option.is_flag else f" {_metavar(option)}")
    return name, f"{option.help}  [{option.unset or option.kind.write(getattr(Settings(), option.field))}]"


def _metavar(option: Option) -> str:
    kind = option.kind
    if isinstance(kind, Choice):
        return "|".join(kind.choices)
    return {Integer: "N", Seconds: "SECONDS"}.get(type(kind), "LIST" if kind.hint == "list" else kind.hint)


def _show_model_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(model_keys())
        ctx.exit()


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--help-model-keys", is_flag=True, is_eager=True, expose_value=False, callback=_show_model_keys,
        help="Show the keys of models and exit.",
    )(command)  # fmt: skip


def _download_only(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Download the files of the models and exit; see `router download --help`."
    return click.option("--download-only", is_flag=True, help=text)(command)


def _params(*, only: Container[str] = settings.BY_FLAG) -> list[click.Parameter]:
    mine = (param for option, param in _SETTINGS.values() if option.flag in only)
    return [*mine, *(param for _, param in _MODELS.values())]


def _params_of_check() -> list[click.Parameter]:
    """All options of the server, so that its exact command line can be checked. Help shows those that decide on
    presets."""
    others = (_as_option(option, hidden=True) for option in settings.OPTIONS if option.flag not in CHECKED)
    return [*_params(only=CHECKED), *others]


def _given(ctx: click.Context, params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command line, before the command's name or after it."""
    given = {name: value for name, value in params.items() if value is not None and value != ()}
    before: dict[str, Any] = ctx.obj or {}
    unknown = [name for name in before if name not in {param.name for param in ctx.command.params}]
    if unknown:
        name = _SETTINGS[unknown[0]][0].flag if unknown[0] in _SETTINGS else _MODELS[unknown[0]][0]
        raise _misplaced(f"--{name}", ctx)
    return {**before, **given}


def _with_names(given: dict[str, Any], models: tuple[str, ...]) -> dict[str, Any]:
    """The options together with models that arguments name."""
    return {**given, "s_model": (*given.get("s_model", ()), *models)} if models else given


def _is_model(name: str) -> bool:
    """True if an argument of `router check` is a model, and no preset file."""
    if os.path.exists(name):
        return os.path.isdir(name)
    return name.startswith("demo:") or (REPO.fullmatch(name) is not None and not name.endswith(".ini"))


def _misplaced(option: str, ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"{option} does not belong to `{ctx.info_name}`.", ctx)


def _split(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Texts of router options by flag, and of preset keys by spelling."""
    options = {
        _SETTINGS[name][0].flag: _text(value, ";" if name == "s_model_names" else ",")
        for name, value in given.items()
        if name in _SETTINGS
    }
    models: dict[str, str] = {}
    for parameter, value in given.items():
        if parameter in _MODELS:
            name = _MODELS[parameter][0]
            models[f"no-{name}" if value is False else name] = "on" if value is False else _text(value)
    return options, models


def _text(value: Any, separator: str = ",") -> str:
    if isinstance(value, tuple):
        return separator.join(value)
    return Flag().write(value) if isinstance(value, bool) else str(value)


@click.group(
    cls=_Router, invoke_without_command=True, params=_params(), help=_ABOUT,
    context_settings={
        "help_option_names": ["-h", "--help"], "max_content_width": 100,
        "token_normalize_func": lambda token: token.replace("_", "-"),  # EricLLM: --max_prompts
    },
)  # fmt: skip
@click.version_option(__version__, prog_name="router")
@_download_only
@_common
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
    cls=_Command, params=[click.Argument(["models"], nargs=-1, metavar="[MODEL]..."), *_params()],
    help="Start the server; the same as `router` without a command. Each MODEL, a folder or org/name of the hub, is"
    f" loaded at start.\n\n{_VARIABLES}",
    short_help="Start the server; the same as `router` without a command.",
)  # fmt: skip
@_download_only
@_common
@click.pass_context
def serve(ctx: click.Context, /, models: tuple[str, ...], download_only: bool, **params: Any) -> int:
    given = _with_names(_given(ctx, params), models)
    return _download(given) if download_only or ctx.meta.get(DOWNLOAD_ONLY) else _serve(given)


@cli.command(
    "download", cls=_Command,
    params=[click.Argument(["models"], nargs=-1, metavar="[MODEL]..."), *_params(only=DOWNLOADED)],
    help="Download and convert the files of models as their first load would, without a server; for container builds."
    " Without a MODEL: all models of --models-preset. `router ... --download-only` does the same for the command line"
    " of a server. Prints each model and the folder that it is loaded from. Exits with 1 if a model fails.",
    short_help="Download the files of models, without a server.",
)  # fmt: skip
@_common
@click.pass_context
def download_command(ctx: click.Context, /, models: tuple[str, ...], **params: Any) -> int:
    return _download(_with_names(_given(ctx, params), models))


def _of_running_router(command: Callable[..., Any]) -> Callable[..., Any]:
    address = click.option(
        "--url", default=client.URL, envvar="ROUTER_URL", show_default=True, metavar="URL",
        help="Address of the router; or ROUTER_URL.",
    )  # fmt: skip
    return address(
        click.option(
            "--api-key", default="", envvar="ROUTER_API_KEY", metavar="KEY",
            help="API key of the router; or ROUTER_API_KEY.",
        )(command)
    )  # fmt: skip


@cli.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    help="Chat with MODEL in the terminal. A running router is used if it lists the model. Otherwise one is started for"
    " the chat, with OPTIONS of `router serve`, such as --ctx-size 4096.",
    short_help="Chat with a model in the terminal.",
)
@_of_running_router
@click.argument("model")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run_command(url: str, api_key: str, model: str, options: tuple[str, ...]) -> int:
    from router.cli import chat  # Imported late: it brings the HTTP client.

    try:
        return chat.run(model, options, url, api_key.partition(",")[0])
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
    try:
        models = client.models(url, api_key.partition(",")[0])
    except client.Unreachable as failed:
        click.echo(f"router ps: {failed}", err=True)
        return UNREACHABLE
    table = client.processes(models, now=time.time(), everything=everything)
    click.echo(json.dumps(models, indent=1) if as_json else table)
    return OK


@cli.command(
    cls=_Command,
    params=[click.Argument(["names"], nargs=-1, metavar="[FILE|MODEL]..."), *_params_of_check()],
    help="Read presets as the server does, start nothing, and report every fault with file and line. Exits with 1 if"
    " there is one. FILE stands for --models-preset; a folder or org/name is a MODEL as for `router serve`. All options"
    " of `router serve` may be given, and are checked.",
    short_help="Read presets as the server does and report every fault.",
)
@click.option("--effective", is_flag=True, help="Show every setting of every model and its source.")
@click.option(
    "--memory",
    is_flag=True,
    help="Estimate each model whose files are here, and report those that not even an empty device holds, with the"
    " settings that would fit. Exits with 4 if there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@_common
@click.pass_context
def check(
    ctx: click.Context, /, names: tuple[str, ...], effective: bool, memory: bool, as_json: bool, **params: Any
) -> int:
    files = [name for name in names if not _is_model(name)]
    options, models = _split(_with_names(_given(ctx, params), tuple(name for name in names if name not in files)))
    if files:
        options["models-preset"] = files[-1]
    parsed, problems = settings.parse(options, os.environ)
    if problems:
        return _refuse(problems, as_json=as_json)
    loaded = load_catalogue(parsed, models, os.environ)
    if lacks := _lacking_packages(loaded):
        loaded = replace(loaded, warnings=(*loaded.warnings, Problem("", 0, "", "", lacks)))
    if pickles := unusable_pickles(loaded, parsed.hub_cache):
        loaded = replace(loaded, problems=(*loaded.problems, *pickles))
    document, text = _document(loaded, effective=effective), _report(loaded, effective=effective)
    misfits: dict[str, str] = {}
    if effective:
        document["options"] = written.options(parsed)
    if memory and not loaded.problems:
        from router.cli import estimate  # Imported late: it reads devices.

        try:
            machine = estimate.Machine(parsed, os.environ, xdg.state(parsed.state_dir))
        except ConfigError as error:
            return _refuse(error.problems, as_json=as_json)
        misfits, warnings = estimate.check(loaded, machine)
        document |= {"does_not_fit": misfits, "placement_warnings": warnings}
        text = "\n".join([*misfits.values(), *(f"warning: {each}" for each in warnings), text])
    if as_json:
        _print_document(document)
    else:
        click.echo(text)
    return FAULTS if loaded.problems else TOO_LARGE if misfits else OK


@cli.command(
    "estimate",
    cls=_Command,
    params=[click.Argument(["model"]), *_params(only=WEIGHED)],
    help="Estimate the memory of a model by segment and device, without a server. MODEL is a name from the presets,"
    " a folder, or a repository of the hub, of which only headers are read. Keys of models are what-ifs, as in"
    " --ctx-size 32768. Exits with 4 if not even an empty device holds it.",
    short_help="Estimate the memory of a model, without a server.",
)
@click.option(
    "--exact", is_flag=True,
    help="Compute the exact estimate in a worker process (some seconds), whatever was learned. Needs the files.",
)  # fmt: skip
@click.option(
    "--forget",
    is_flag=True,
    help="First drop what was learned of the model's memory in earlier loads. A running router forgets it, too.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@_common
@click.pass_context
def estimate_command(ctx: click.Context, /, model: str, exact: bool, forget: bool, as_json: bool, **params: Any) -> int:
    from router.cli import estimate  # Imported late: it reads devices, which no other command needs.

    def run(chosen: _ChosenModel) -> int:
        machine = estimate.Machine(chosen.settings, os.environ, xdg.state(chosen.settings.state_dir))
        report = estimate.report(chosen.preset, chosen.loaded, machine, exact=exact, forget=forget)
        if as_json:
            _print_document(estimate.document(report))
        else:
            click.echo(estimate.text(report))
        if not chosen.preset.python and (lacks := missing_packages()):
            click.echo(f"warning: {lacks}", err=True)
        return OK if report.fits else TOO_LARGE

    return _run_for_model(ctx, params, model, run, code="estimate_failed", as_json=as_json)


@cli.command(
    "prepare",
    cls=_Command,
    params=[click.Argument(["model"]), *_params(only=PREPARED)],
    help="Convert a model once for faster loads, without a server. MODEL is a name from the presets,"
    " a folder, or a repository in the hub cache. Exits with 0 if there is nothing to convert, with 1 if the conversion"
    " fails.",
    short_help="Convert a model once for faster loads.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@_common
@click.pass_context
def prepare_command(ctx: click.Context, /, model: str, as_json: bool, **params: Any) -> int:
    from router.cli import prepare  # Imported late: only `estimate` reads checkpoints as well.

    def show_progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            # Without a total it waits for another conversion, and `done` are the bytes that this one has written.
            text = f"{done >> 20} of {total >> 20} MiB" if total else f"waiting for another one ({done >> 20} MiB)"
            click.echo(f"\rconverting: {text:40}", nl=0 < total == done, err=True)

    def run(chosen: _ChosenModel) -> int:
        state = xdg.state(chosen.settings.state_dir)
        prepared = prepare.prepare(chosen.preset, chosen.settings, os.environ, state=state, report=show_progress)
        if as_json:
            _print_document({**asdict(prepared), "converted": prepared.is_converted})
        else:
            click.echo(prepare.text(prepared))
        return OK

    return _run_for_model(ctx, params, model, run, code="prepare_failed", as_json=as_json)


@dataclass(frozen=True)
class _ChosenModel:
    """The model that a command is about, and the configuration in which it was found."""

    settings: Settings
    loaded: LoadedPresets
    preset: Preset


def _run_for_model(
    ctx: click.Context, params: Mapping[str, Any], name: str, run: Callable[[_ChosenModel], int], *, code: str,
    as_json: bool,
) -> int:  # fmt: skip
    """Find the model, run the command, and print its errors. `code`: that of a failure in JSON documents."""
    options, models = _split(_given(ctx, params))
    parsed, problems = settings.parse(options, os.environ)
    if problems:
        return _refuse(problems, as_json=as_json)
    loaded = load_catalogue(parsed, for_all(models), os.environ)
    if loaded.problems:
        return _refuse(loaded.problems, as_json=as_json)
    try:
        preset, warnings = find_preset(name, loaded, models, os.environ)
        _warn(warnings)
        return run(_ChosenModel(parsed, loaded, preset))
    except ConfigError as error:
        return _refuse(error.problems, as_json=as_json)
    except RouterError as error:
        if as_json:
            _print_document({"error": {"code": code, "message": str(error)}})
        else:
            click.echo(f"router: {error}", err=True)
        return FAULTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0, 1 faults or failure, 2 usage or configuration, 3 no router answers, 4
    the model does not fit, 130 interrupted."""
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


def _better(error: click.NoSuchOption) -> click.UsageError:
    """The same error with its reason, or with the most similar option."""
    name = error.option_name
    if name.lstrip("-") in settings.LATER:
        instead = settings.LATER[name.lstrip("-")] or "remove it"
        return click.NoSuchOption(name, f"{name} is not offered by this version; {instead}.", ctx=error.ctx)
    if name.lstrip("-").removeprefix("no-") in settings.SPELLINGS and error.ctx is not None:
        return _misplaced(name, error.ctx)
    near = preset_keys.nearest_key(name, settings.BY_FLAG)
    return click.NoSuchOption(name, possibilities=[f"--{near}"] if near else [], ctx=error.ctx)


def _serve(given: Mapping[str, Any]) -> int:
    gc.disable()  # Objects made before serving stay for the whole run: a search for garbage finds nothing.
    try:
        return _load_and_serve(given)
    finally:
        gc.enable()


def _load_and_serve(given: Mapping[str, Any]) -> int:
    options, models = _split(given)
    parsed, problems = settings.parse(options, os.environ)
    if problems:
        return _refuse(problems)
    try:
        read_keys(parsed)
    except ConfigError as error:
        return _refuse(error.problems)
    first = [load_catalogue(parsed, models, os.environ)]
    _warn(first[0].warnings)
    if first[0].problems:
        return _refuse(first[0].problems)
    if lacks := _lacking_packages(first[0]):
        if not any(preset.python for preset in first[0].presets.values()):
            return _refuse([lacks])
        click.echo(f"warning: {lacks}", err=True)

    def load(further: Further) -> LoadedPresets:
        """The presets just read, at the first call; after that the current ones."""
        return first.pop() if first else load_catalogue(parsed, models, os.environ, further)

    from router.cli.serve import run  # Imported late: it brings the HTTP server, which no other command needs.

    return run(parsed, load, lambda: read_keys(parsed))


def _lacking_packages(loaded: LoadedPresets) -> str:
    """The packages that the workers of some models lack; empty if all models have an interpreter of their own."""
    presets = loaded.presets.values()
    return "" if presets and all(preset.python for preset in presets) else missing_packages()


def _download(given: Mapping[str, Any]) -> int:
    from router.cli.download import download  # Imported late: only `estimate` and `prepare` read checkpoints as well.

    options, models = _split(given)
    parsed, problems = settings.parse(options, os.environ)
    if problems:
        return _refuse(problems)
    loaded = load_catalogue(parsed, models, os.environ)
    _warn(loaded.warnings)
    if loaded.problems:
        return _refuse(loaded.problems)
    ids = loaded.named or [id for id, preset in loaded.presets.items() if preset.source == "preset"]
    if not ids:
        return _refuse(["no model is named; write router download org/name, or --models-preset FILE"])
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


def _warn(warnings: Iterable[Problem]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _refuse(problems: Sequence[Problem | str], *, as_json: bool = False) -> int:
    if as_json:
        _print_document({"error": {"code": "configuration", "message": "; ".join(map(str, problems))}})
    else:
        click.echo("\n".join(map(str, problems)), err=True)
    return USAGE


def _print_document(content: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"schema": SCHEMA, **content}, ensure_ascii=False, indent=1))


def _report(loaded: LoadedPresets, *, effective: bool) -> str:
    lines = [str(problem) for problem in loaded.problems]
    lines += [f"warning: {warning}" for warning in loaded.warnings]
    if effective:
        for id, preset in loaded.presets.items():
            rows = [(key, _short(value), origin) for key, value, origin in written.effective(preset)]
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            lines += ["", f"[{id}]", *(f"{key:{widths[0]}} = {value:{widths[1]}}  ; {at}" for key, value, at in rows)]
        lines.append("")
    lines += [
        f"one worker for {' '.join(group)}" for group in worker_groups.group_presets(loaded.presets) if len(group) > 1
    ]
    if loaded.problems:
        lines.append(_count(len(loaded.problems), "fault"))
    else:
        count = f"{_count(len(loaded.presets), 'model')}, no fault"
        lines.append(f"{count}: {' '.join(loaded.presets)}" if loaded.presets else count)
    return "\n".join(lines)


def _document(loaded: LoadedPresets, *, effective: bool) -> dict[str, Any]:
    models: list[dict[str, Any]] = []
    groups = {id: group for group in worker_groups.group_presets(loaded.presets) for id in group}
    for id, preset in loaded.presets.items():
        model: dict[str, Any] = {"id": id, "source": preset.source, "aliases": list(preset.aliases)}
        model["shares"] = [other for other in groups[id] if other != id]
        if effective:
            rows = written.effective(preset)
            model["settings"] = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        models.append(model)
    return {
        "problems": [asdict(problem) for problem in loaded.problems],
        "warnings": [asdict(warning) for warning in loaded.warnings],
        "models": models,
    }


def model_keys() -> str:
    """The reference of preset keys, for a terminal."""
    lines = [_KEYS_ABOUT]
    group = ""
    for key in KEYS:
        if key.group != group:
            group = key.group
            lines += ["", f"{group}:"]
        also = ", ".join([*key.also, *key.switches])
        facts = "; ".join(part for part in (also, _default(key)) if part)
        text = f"{key.help} ({key.kind.hint})  [{facts}]"
        first, *rest = textwrap.wrap(text, 72, break_on_hyphens=False) or [""]
        lines += [f"  {key.name:22} {first}", *(f"  {'':22} {line}" for line in rest)]
    return "\n".join(lines)


def _default(key: PresetKey) -> str:
    if key.unset or key.name in {"model", "hf-repo", "import"}:
        return key.unset
    if key.name == "n-gpu-layers":
        return "auto"
    return key.kind.write(DEFAULTS[key.field])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
