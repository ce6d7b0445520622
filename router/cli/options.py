"""The options of all commands, generated from the tables of `settings` and `presets`, and their help."""

import json
import os
import re
import textwrap
from collections.abc import Container, Iterable, Mapping
from typing import Any

import click

from router.config import preset_keys, settings
from router.config.option_types import Flag, Integer, LogitBias, Names, OneOf, Seconds, Strings
from router.config.presets import DEFAULTS, KEYS, WHOLE_STRINGS, PresetKey
from router.config.settings import Option, Settings

_KEYS_IN_HELP = """\
Every preset key is also a flag and takes precedence for every model, as in --ctx-size 4096. --help-model-keys lists
the keys.
"""
_KEYS_ABOUT = """\
Keys of a model: in a section [id] of a preset file, in [*] for all models, as a flag (--ctx-size 4096) or as a variable
(ROUTER_CTX_SIZE). Precedence: flag, [id], [*], variable. In brackets: other spellings; default.
"""
URL = "http://127.0.0.1:8080"  # of a router without options
REPEATED = frozenset({
    "model", "model-names", "hf-repo", "api-key", "admin-key", "device-limit", "models-memory-margin", "allowed-hosts",
})  # fmt: skip
# Options of LightLLM and vLLM that take several words, and the form of these words. Names of models have no slash here:
# a word with one is a MODEL, and so is a demo model.
_SEVERAL = {
    "--mode": "(triton|ppl|lmdeploy)_.*",
    "--served-model-name": "(?!demo:)[^-/][^/]*",
    "--lora-modules": r"[^-/=]+=.+|\s*\{.*",
}
NARROW = 70  # columns from which names and texts of options stand side by side


def _as_option(option: Option, *, hidden: bool = False) -> click.Option:
    names = [f"--{option.flag}/--no-{option.flag}"] if option.is_flag else [f"--{option.flag}", *option.also]
    repeats = option.flag in REPEATED
    return click.Option([*names, f"s_{option.field}"], default=None, multiple=repeats, hidden=hidden)


def _model_options() -> Iterable[tuple[str, str, click.Option]]:
    """(parameter, spelling, option) of every preset key and its other spellings. Hidden, since there are hundreds."""
    for number, (name, option) in enumerate(preset_keys.BY_SPELLING.items()):
        if name in settings.SPELLINGS:
            continue
        parameter = f"m_{number}"
        is_short = len(name) <= 5 or name == "ncmoed"  # llama-server: -np, -ngl
        dashes = ["-"] if len(name) == 1 else ["--", "-"] if is_short else ["--"]
        is_flag = preset_keys.Spelling(option, name).is_flag
        names = [f"{dash}{name}" for dash in dashes]
        if is_flag and len(name) > 1:  # also -no-kvu, which would be -n with the value "o-kvu"
            names = [f"{given}/{given.removesuffix(name)}no-{name}" for given in names]
        kind = option.kind if isinstance(option, PresetKey) else None
        repeats = isinstance(kind, LogitBias | Names | Strings)
        facts: dict[str, Any] = {"is_flag": is_flag}
        # vLLM's --enable-lora and -fa of older llama-servers have no value: they mean `on` if an option or nothing
        # follows.
        if not is_flag and isinstance(kind, OneOf) and "on" in (*kind.also, *kind.choices):
            facts["flag_value"] = "on"
        yield parameter, name, click.Option([*names, parameter], **facts, default=None, hidden=True,
                                            multiple=name == "env" or (repeats and not is_flag))  # fmt: skip


SETTINGS: Mapping[str, tuple[Option, click.Option]] = {
    f"s_{option.field}": (option, _as_option(option)) for option in settings.OPTIONS
}
MODEL_KEYS: Mapping[str, tuple[str, click.Option]] = {
    parameter: (name, option) for parameter, name, option in _model_options()
}


def _show_model_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(_model_keys())
        ctx.exit()


_HELP = click.Option(
    ["--help-model-keys"], is_flag=True, is_eager=True, expose_value=False, callback=_show_model_keys,
    help="Show the keys of models and exit.",
)  # fmt: skip


class Command(click.Command):
    """A command whose help groups the router's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _joined(args, getattr(self, "commands", ())))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own_options = [SETTINGS[param.name][0] for param in options if param.name in SETTINGS and not param.hidden]
        most = 34 if formatter.width > NARROW else formatter.width // 3
        for group in settings.GROUPS:
            rows = [_row(option) for option in own_options if option.group == group]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=most)
        with formatter.section("Keys of models"):
            formatter.write_text(" ".join(_KEYS_IN_HELP.split()))
        others = [param.get_help_record(ctx) for param in options if param.name not in SETTINGS]
        with formatter.section("Other options"):
            formatter.write_dl([record for record in others if record], col_max=most)


def _joined(args: list[str], commands: Container[str]) -> list[str]:
    """The command line with all words after an option that takes several as its one value."""
    joined: list[str] = []
    pattern, has_value = "", False  # of the option before: the form of further words, and whether it has its first
    for word in args:
        if has_value and re.fullmatch(pattern, word) and word not in commands and not os.path.exists(word):
            joined[-1] += f",{word}"
            continue
        has_value = bool(pattern) and not has_value and not word.startswith("-")
        joined.append(word)
        if not has_value:
            pattern = _SEVERAL.get(word.replace("_", "-"), "")
    return joined


def _row(option: Option) -> tuple[str, str]:
    name = f"--[no-]{option.flag}" if option.is_flag else f"--{option.flag} {_metavar(option)}"
    facts = "; ".join([_default_of(option), *option.env])
    return ", ".join([name, *option.also]), f"{option.help}  [{facts}]"


def short_row(option: Option) -> tuple[str, str]:
    short = next((f"{name}, " for name in option.also if len(name) <= 3), "")
    name = f"{short}--{option.flag}" + ("" if option.is_flag else f" {_metavar(option)}")
    return name, f"{option.help}  [{_default_of(option)}]"


def _default_of(option: Option) -> str:
    return option.unset or option.kind.write(getattr(Settings(), option.field))


def _metavar(option: Option) -> str:
    kind = option.kind
    if isinstance(kind, OneOf):
        return "|".join(kind.choices)
    return {Integer: "N", Seconds: "SECONDS"}.get(type(kind), "LIST" if kind.hint == "list" else kind.hint)


def command_params(*, only: Container[str] = settings.BY_FLAG, hidden: Container[str] = ()) -> list[click.Parameter]:
    """The options in `only` and all keys of models. Those in `hidden` are accepted, but not in the help."""
    own_options = (
        _as_option(option, hidden=True) if option.flag in hidden else param
        for option, param in SETTINGS.values()
        if option.flag in only
    )
    return [*own_options, *(param for _, param in MODEL_KEYS.values()), _HELP]


def given_options(ctx: click.Context, params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command line, before the command's name or after it."""
    given = {name: value for name, value in params.items() if value is not None and value != ()}
    before: dict[str, Any] = ctx.obj or {}
    unknown = [name for name in before if name not in {param.name for param in ctx.command.params}]
    if unknown:
        name = SETTINGS[unknown[0]][0].flag if unknown[0] in SETTINGS else MODEL_KEYS[unknown[0]][0]
        raise misplaced(f"--{name}", ctx)
    return {**before, **given}


def with_names(given: dict[str, Any], models: tuple[str, ...]) -> dict[str, Any]:
    """The options together with models that arguments name."""
    return {**given, "s_model": (*given.get("s_model", ()), *models)} if models else given


def misplaced(option: str, ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"{option} does not belong to `{ctx.info_name}`.", ctx)


def split(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Texts of router options by flag, and of preset keys by spelling."""
    options = {
        SETTINGS[name][0].flag: _text(value, ";" if name == "s_model_names" else ",")
        for name, value in given.items()
        if name in SETTINGS
    }
    models: dict[str, str] = {}
    for parameter, value in given.items():
        if parameter in MODEL_KEYS:
            name = MODEL_KEYS[parameter][0]
            if name in WHOLE_STRINGS:
                models[name] = json.dumps(value)
            else:
                models[f"no-{name}" if value is False else name] = "on" if value is False else _text(value)
    return options, models


def _text(value: Any, separator: str = ",") -> str:
    if isinstance(value, tuple):
        return separator.join(value)
    return Flag().write(value) if isinstance(value, bool) else str(value)


def _model_keys() -> str:
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
