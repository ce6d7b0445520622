"""The option tables in docs/migration: their rows, and what `router check` reports for each.

A page has tables below headings that say where an option is given (`GIVERS`), with the columns

    | option | given | verdict | effect |

`given` has one code span per line of a file, per variable, per command line, or per JSON object of request members
(`request_members`). `effect` has settings in code spans,
which must be in effect, words in double quotes, which must be in a message, or "no change".
"""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from router.cli.main import check, main
from router.config import preset_keys
from router.config.effective import BUILT_IN
from router.config.settings import BY_VARIABLE
from tests.migration import request_members
from tests.sparse import write_weights

PAGES = Path(__file__).parents[2] / "docs" / "migration"
HEAD = ["option", "given", "verdict", "effect"]
VERDICTS = ("honoured", "mapped", "no effect", "refused")
REQUEST_MEMBERS = "Request members"
NO_CHANGE = "no change"  # the value states what happens anyway; another row of the option must give a message
SOURCES = ("model", "hf-repo", "import")  # keys that name the model of a section


@dataclass(frozen=True)
class Row:
    page: str
    heading: str
    option: str
    given: tuple[str, ...]
    verdict: str
    effect: str

    @property
    def settings(self) -> tuple[str, ...]:
        return _spans(self.effect)

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", self.effect)))

    def __str__(self) -> str:
        return f"{self.page}: {self.heading}: {' '.join(self.given)}"


@dataclass(frozen=True)
class Outcome:
    """The report of `router check`: problems, warnings, and the settings in effect with their origins."""

    problems: str
    warnings: str
    settings: Mapping[str, tuple[str, str]]


def rows(page: Path) -> Iterator[Row]:
    """The rows of all option tables of a page. Other tables are skipped."""
    heading, in_table = "", False
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip()
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == HEAD:
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and not set(cells[0]) <= set("-: "):
            option, given, verdict, effect = cells
            yield Row(page.stem, heading, option, _spans(given), verdict, effect)


def _spans(text: str) -> tuple[str, ...]:
    """The code spans of a cell; double backticks surround a span that contains one."""
    return tuple(found[2].strip() for found in re.finditer(r"(`+)(.+?)\1(?!`)", text))


# config.json of the model of rows.
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip
QUANTIZED = re.compile(r"(?:-q |quanti(?:ze|zation)\s*=\s*)(awq|gptq|fp8)", re.IGNORECASE)
RERANKS = re.compile("rerank|CrossEncoder")


def build_world(folder: Path) -> None:
    """Build the files that rows may name by relative paths: `tiny` (a model), `adapter`, and small text files."""
    for name, text in {
        "tiny/config.json": json.dumps(TINY),
        "tiny/tokenizer_config.json": "{}",
        "adapter/adapter_config.json": '{"peft_type": "LORA", "r": 8}',
        "adapter/adapter_model.safetensors": "",
        "template.jinja": "{{ messages }}",
        "grammar.gbnf": "root ::= [0-9]+",
        "schema.json": '{"type": "object"}',
        "empty/README": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    write_weights(folder / "tiny" / "model.safetensors", {"w": ("F32", [8])})


def _write_config(given: tuple[str, ...]) -> None:
    """Make the model one that a row asks for, since `router check` compares them: quantized, or a cross-encoder."""
    config: dict[str, Any] = dict(TINY)
    for text in given:
        if found := QUANTIZED.search(text):
            config["quantization_config"] = {"quant_method": found[1], "bits": 4}
        if RERANKS.search(text):
            config.update(architectures=["LlamaForSequenceClassification"], id2label={"0": "score"})
    Path("tiny/config.json").write_text(json.dumps(config))


def _of_section(given: tuple[str, ...], patch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the section [m] of a preset file, with a model unless a line names one."""
    spellings = [preset_keys.find(line.partition("=")[0].strip()) for line in given]
    names_model = any(spelling is not None and spelling.option.name in SOURCES for spelling in spellings)
    Path("row.ini").write_text("\n".join(["[m]", *([] if names_model else ["model = tiny"]), *given, ""]))
    return ["check", "row.ini"]


def _of_properties(given: tuple[str, ...], patch: pytest.MonkeyPatch) -> list[str]:
    """Lines of a serving.properties in a folder that is named, with a model unless a line names one."""
    names_model = any(line.startswith("option.model_id") for line in given)
    folder = Path("lmi/m")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*([] if names_model else [f"option.model_id={Path('tiny').absolute()}"]), *given, ""]
    (folder / "serving.properties").write_text("\n".join(lines))
    return ["check", str(folder)]


def _of_environment(given: tuple[str, ...], patch: pytest.MonkeyPatch) -> list[str]:
    """Variables, and a preset file with the section [m] unless a variable names a model."""
    for pair in given:
        patch.setenv(*pair.split("=", 1))
    options = [BY_VARIABLE.get(pair.partition("=")[0]) for pair in given]
    names_model = any(option is not None and option.flag in SOURCES for option in options)
    return ["check"] if names_model else ["check", *_of_section((), patch)[1:]]


def _of_command_line(given: tuple[str, ...], patch: pytest.MonkeyPatch) -> list[str]:
    """Options beside `--models-preset`, or a complete command line that begins with `router`."""
    (line,) = given
    words = shlex.split(line)
    preset = [] if words[0] == "router" else ["--models-preset", *_of_section((), patch)[1:]]
    return ["check", *preset, *words[words[0] == "router" :]]


GIVERS: Mapping[str, Callable[[tuple[str, ...], pytest.MonkeyPatch], list[str]]] = {
    "Preset keys": _of_section,
    "serving.properties": _of_properties,
    "Environment variables": _of_environment,
    "Command line": _of_command_line,
}


def run(words: list[str]) -> int:
    """Run the command line. If it only names a file, skip its parsing, which takes most of the time of such a run."""
    if len(words) > 2 or words[-1].startswith("-"):
        return main([*words, "--effective", "--json"])
    with click.Context(check) as context:
        context.params = {"names": tuple(words[1:]), "effective": True, "memory": False, "as_json": True}
        return int(check.invoke(context))


def outcome(heading: str, given: tuple[str, ...], page: str = "") -> Outcome:
    """Run `router check` in the working directory (`build_world`) for what a row gives. The model in it is [m].

    Request members are sent in the call of `page`."""
    if heading == REQUEST_MEMBERS:
        return Outcome(*request_members.ask(page, given))
    _write_config(given)
    printed, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = run(GIVERS[heading](given, patch))
    if not printed.getvalue():
        return Outcome(errors.getvalue(), "", {})
    document = json.loads(printed.getvalue())
    if "error" in document:
        return Outcome(document["error"]["message"], "", {})
    assert (code == 0) is not bool(document["problems"])
    return Outcome(_text(document["problems"]), _text(document["warnings"]), _settings(document))


def _settings(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """(value, origin) of the settings of the first model by key, and of the options of the router by `--flag`."""
    found = {f"--{flag}": (value, BUILT_IN) for flag, value in document["options"].items()}
    for setting in document["models"][0]["settings"] if document["models"] else []:
        found[setting["key"]] = (setting["value"].replace(f"{Path.cwd()}/", ""), setting["origin"])
    return found


def _text(problems: list[dict[str, Any]]) -> str:
    places = [problem["section"] or problem["file"] for problem in problems]
    hints = [f"; did you mean {problem['suggestion']}?" if problem["suggestion"] else "" for problem in problems]
    return "\n".join(
        f"{place}: {problem['message']}{hint}".replace('"', "")
        for place, problem, hint in zip(places, problems, hints, strict=True)
    )
