"""The documents agree with the program."""

import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from router.config.presets import KEYS
from router.config.settings import OPTIONS
from tests.sparse import write_weights
from worker.protocol.routes import ROUTES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TESTS = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))

INVARIANTS = (
    "no_plan_exceeds_the_margin",
    "no_victim_is_superfluous",
    "a_leased_worker_is_not_stopped",
    "a_ready_model_waits_for_nobody",
    "the_kth_in_the_queue_waits_no_longer_than_stated",
    "a_state_never_goes_back",
    "memory_is_reserved_before_spawn_and_returned_after_settling",
    "no_eviction_for_a_client_that_left",
    "many_cold_requests_begin_one_load",
    "no_eviction_or_refusal_on_a_static_estimate",
    "best_effort_never_displaces_required",
    "no_child_outlives_the_router",
    "every_request_ends_once",
    "the_answer_is_the_workers_bytes",
)
"""The invariants of the design. Each has a test of its name."""


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_has_a_test_of_its_name(name: str) -> None:
    assert re.search(rf"def test_\w*{name}", TESTS)


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 8 << 10


def test_every_option_in_the_readme_and_its_pages_exists() -> None:
    flags = {option.flag for option in OPTIONS} | {f"no-{option.flag}" for option in OPTIONS if option.is_flag}
    flags |= {name.lstrip("-") for option in OPTIONS for name in option.also}
    flags |= {key.name for key in KEYS}  # a preset key as a flag holds for every model
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = set(re.findall(r"`--([a-z][a-z-]+)", pages)) - {"help", "help-model-keys", "effective"}
    assert named
    assert named <= flags


def test_the_page_of_apis_lists_the_paths_that_are_served() -> None:
    served = {route.path for route in ROUTES}
    named = set(re.findall(r"`(?:GET |POST |DELETE )?(/[^` ]*)`", (ROOT / "docs" / "apis.md").read_text()))
    assert len(named) > 10
    assert named <= served
    for route in ROUTES:
        is_named = any(route.path in (path, path.removeprefix("/v1"), f"/v1{path}") for path in named)
        is_below = any(route.path.startswith(f"{path}/") for path in named)
        no_api = route.handler in ("about.index", "about.page_file", "about.disabled", "about.not_offered")
        assert is_named or is_below or no_api, route.path


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for file in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            assert target.startswith("https://") or (file.parent / target).exists(), f"{file.name}: {target}"


@pytest.mark.parametrize("text", re.findall(r"```ini\n(.+?)```", README, re.DOTALL))
def test_a_preset_in_the_readme_has_no_fault(tmp_path: Path, text: str) -> None:
    from router.cli.main import main

    folder = tmp_path / "models" / "bge-m3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors", {"w": ("F32", [8])})
    file = tmp_path / "models.ini"
    file.write_text(text.replace("/models/bge-m3", str(folder)))
    assert main(["check", str(file)]) == 0


def test_no_file_names_a_folder_of_one_machine() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if names.returncode != 0:
        pytest.skip("not a checkout")
    for name in names.stdout.splitlines():
        file = ROOT / name
        if file.suffix in (".py", ".sh", ".md", ".toml", ".ini", ".txt") and name != "tests/test_documents.py":
            assert not re.search(r"(?<![\w.])/(work|farm|root)/", file.read_text()), name


def test_no_file_is_larger_than_two_mebibytes() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in names.stdout.splitlines():
        assert (ROOT / name).stat().st_size <= 2 << 20, name


def test_every_file_named_in_the_design_exists() -> None:
    named = re.findall(r"`((?:router|worker|tests|config)/[\w/.]+)`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def command_lines() -> list[str]:
    """The lines and code spans of the documents that begin with `router`, without comments."""
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL))
    found = re.findall(r"^router .*", blocks, re.MULTILINE) + re.findall(r"`(router [^`]+)`", text)
    return sorted({line.partition(" #")[0].strip() for line in found})


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_in_the_documents_is_parsed(line: str) -> None:
    from router.cli.main import cli

    words = shlex.split(line)[1:]
    if words[0].startswith("-"):
        words = ["serve", *words]
    name, command, rest = cli.resolve_command(click.Context(cli, info_name="router"), words)
    assert command is not None
    # `--help` exits; `router estimate` in a sentence is a command without its model
    with contextlib.suppress(click.exceptions.Exit, click.MissingParameter):
        command.make_context(name, rest, parent=click.Context(cli, info_name="router", **cli.context_settings))


def test_the_lines_for_nginx_pass_the_host_and_need_no_setting_for_streams() -> None:
    (block,) = re.findall(r"```nginx\n(.+?)```", README, re.DOTALL)
    assert "proxy_set_header Host $host;" in block  # --allowed-hosts is about this name
    assert "proxy_buffering off;" in block or "X-Accel-Buffering: no" in README
