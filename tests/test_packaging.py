"""The installation: the wheel, the pins, the two commands, and the bootstrap that they use."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from router import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MIB = 1 << 20


def script(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


# --- pins ------------------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = [line for line in script("config/constraints.txt").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def needs() -> list[Requirement]:
    written = [*PROJECT["dependencies"], *(need for extra in EXTRAS.values() for need in extra)]
    return [need for need in map(Requirement, written) if need.name != PROJECT["name"]]


@pytest.mark.parametrize("need", needs(), ids=str)
def test_every_dependency_has_a_pin_within_its_range(need: Requirement) -> None:
    assert need.specifier.contains(pins()[canonicalize_name(need.name)])


def test_the_router_knows_the_name_of_its_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION


def test_pins_are_sorted_names_without_local_labels() -> None:
    found = pins()
    assert list(found) == sorted(found)
    assert [name for name in found if name != canonicalize_name(name)] == []
    assert [version for version in found.values() if "+" in version] == []


def test_the_routers_own_packages_bring_no_torch() -> None:
    names = {canonicalize_name(Requirement(need).name) for need in PROJECT["dependencies"]}
    assert names & {"torch", "transformers", "accelerate", "safetensors"} == set()


def test_the_known_name_of_an_extra_is_its_successor() -> None:
    aliases = {name: needs for name, needs in EXTRAS.items() if needs[0].startswith(PROJECT["name"])}
    assert all(Requirement(need).extras <= EXTRAS.keys() for needs in aliases.values() for need in needs)


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_both_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size <= 5 * MIB
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"router", "worker"}
    assert {
        "router/data/models.ini",
        "router/data/demo.ini",
        "worker/fetch/demo/chat/model.safetensors",
        "worker/fetch/demo/chat/README.md",
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_runs_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = (
        "import pathlib, router.cli.main, worker.fetch.demo\n"
        "print(pathlib.Path(router.__file__).parent.parent)\n"
        "print(worker.fetch.demo.make('chat', pathlib.Path('/nowhere'), print))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [str(tmp_path / "site"), str(tmp_path / "site/worker/fetch/demo/chat")],
    )


# --- the two commands ------------------------------------------------------------------------------------------------


def test_ci_calls_the_test_command_and_nothing_else() -> None:
    lines = [line for line in script(".ci/run").splitlines() if line and not line.startswith(("#", "set "))]
    assert re.fullmatch(r'exec bash "\$root/scripts/test\.sh" --venv \S+ "\$@" </dev/null', lines[-1])
    assert [line.partition("=")[0] for line in lines[:-1]] == ["root"]


@pytest.mark.parametrize("name", [".ci/run", "scripts/run.sh", "scripts/test.sh", "scripts/refresh_constraints.sh"])
def test_a_script_can_be_executed_and_parsed(name: str) -> None:
    assert (ROOT / name).stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def program(folder: Path, body: str) -> str:
    """A program that stands in for an interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The two scripts, with an environment whose programs only say how they were called."""
    (tmp_path / "scripts").mkdir()
    for name in ("run.sh", "test.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "scripts/bootstrap.py").write_text("import sys; print('bootstrap', *sys.argv[1:])", "utf-8")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("router", "ruff", "mypy", "pytest"):
        called = program(tmp_path, f'echo {name} "$@" $ROUTER_DEMO $OMP_NUM_THREADS; [ "$FAIL" != {name} ]')
        Path(called).rename(tmp_path / ".venv/bin" / name)
    return tmp_path


def called(checkout: Path, script: str, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    """Exit status, and what was called in which way."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = ["bash", str(checkout / "scripts" / script), *arguments]
    done = subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if not line.startswith("==")]


def test_run_tells_how_to_get_the_command_into_a_shell(checkout: Path) -> None:
    def told(path: str) -> str:
        command = ["bash", str(checkout / "scripts/run.sh")]
        return subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        ).stderr

    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    assert told(os.environ["PATH"]).endswith(f'export PATH="{checkout}/.venv/bin:$PATH"\n')
    assert told(path) == ""
    assert 'export PATH="$PWD/.venv/bin:$PATH"' in script("README.md")


def test_run_serves_the_demo_unless_the_user_decides(checkout: Path) -> None:
    installed = "bootstrap --extras worker"
    assert called(checkout, "run.sh", "--port", "9000") == (0, [installed, "router --port 9000 on"])
    assert called(checkout, "run.sh", "org/name", ROUTER_DEMO="") == (0, [installed, "router org/name"])


def test_the_test_command_checks_everything_and_shows_the_tests_last(checkout: Path) -> None:
    venv = checkout / ".venv"
    assert called(checkout, "test.sh", "-x", "--venv", str(venv), "tests/router") == (
        0,
        [
            f"bootstrap --extras worker,dev --venv {venv}",
            "ruff check .",
            "ruff format --check .",
            "pytest -n 3 --dist loadfile --no-loadscope-reorder -x tests/router 1",
        ],
    )


@pytest.mark.parametrize("step", ["ruff", "mypy", "pytest"])
def test_the_test_command_fails_if_one_step_does(checkout: Path, step: str) -> None:
    status, done = called(checkout, "test.sh", FAIL=step)
    assert status == 1
    assert done[-1].startswith("pytest")


# --- bootstrap -------------------------------------------------------------------------------------------------------


def bootstrap(*arguments: str, root: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/bootstrap.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "BOOTSTRAP_PYTHON"}
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 3.8.10", "3.11 or newer is needed; {python} is 3.8.10. Install one, or name one: BOOTSTRAP_PYTHON="),
        ("echo 3.12.4; exit 1", "apt install python3.12-venv"),
        ("", "{python} does not run"),
    ],
    ids=["too old", "without venv", "missing"],
)
def test_a_python_that_cannot_be_used_is_refused_with_the_remedy(tmp_path: Path, body: str, message: str) -> None:
    python = program(tmp_path, body) if body else str(tmp_path / "none")
    done = bootstrap("--venv", str(tmp_path / "venv"), BOOTSTRAP_PYTHON=python)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert message.format(python=python) in done.stderr


def test_an_unknown_extra_is_refused_by_name(tmp_path: Path) -> None:
    done = bootstrap("--extras", "worker,wroker", "--venv", str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "there is no extra 'wroker'; pyproject.toml has worker" in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/thesis.tex").write_text("x", "utf-8")
    done = bootstrap("--venv", str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "was not created by this script" in done.stderr
    assert (tmp_path / "venv/thesis.tex").exists()


FAKE_PYTHON = """
case "$1 $2" in
    "-m venv")
        echo make >>"$JOURNAL"
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        echo "version = 3.11.7" >"$folder/pyvenv.cfg" ;;
    "-m pip")
        [ "$3" = --version ] && exit 0
        shift 3
        echo "pip $*" >>"$JOURNAL"
        case $* in
            *--dry-run*) exit "${LOOK:-0}" ;;
            *--index-url*) exit "${INDEX:-0}" ;;
            *) exit "${INSTALL:-0}" ;;
        esac ;;
    "-P -c") case $3 in *"version('torch')"*) echo "$TORCH" ;; esac ;;
    *) echo 3.11.7 ;;
esac
"""


class World:
    """A machine whose interpreter and pip are a fake that keeps a journal; LOOK, INDEX and INSTALL are what pip
    answers when it looks for the CPU build, asks PyTorch's own index, and installs everything."""

    def __init__(self, folder: Path, root: Path = ROOT):
        self.folder, self.root = folder, root
        self.python = program(folder, FAKE_PYTHON)
        self.venv = folder / "venv"

    def run(self, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
        """Exit status, what was done, what was said."""
        journal = self.folder / "journal"
        journal.unlink(missing_ok=True)
        variables = {"BOOTSTRAP_PYTHON": self.python, "JOURNAL": str(journal), **variables}
        done = bootstrap("--venv", str(self.venv), *arguments, root=self.root, **variables)
        return done.returncode, journal.read_text("utf-8").splitlines() if journal.exists() else [], done.stderr


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


TORCH = pins()["torch"]
PINNED = f"pip -qq -c {ROOT}/config/constraints.txt"
LOOK = f"pip --dry-run --no-deps torch=={TORCH}+cpu"


def test_packages_are_installed_again_when_their_list_changed(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    for name in ("pyproject.toml", "config/constraints.txt", "scripts/bootstrap.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    world = World(tmp_path, copy)
    for name in ("pyproject.toml", "config/constraints.txt"):
        world.run("--torch", "cpu")
        assert world.run("--torch", "cpu") == (0, [], "")
        with (copy / name).open("a") as file:
            file.write("# changed\n")
        assert [line.split()[0] for line in world.run("--torch", "cpu")[1]] == ["pip", "pip"]


def test_one_call_of_pip_installs_everything(world: World) -> None:
    _, done, _ = world.run("--torch", "cpu", "--extras", "worker,dev")
    assert done == ["make", LOOK, f"{PINNED} torch=={TORCH}+cpu -e .[dev,worker]"]


def test_an_interrupted_install_is_repeated_in_the_same_environment(world: World) -> None:
    status, done, said = world.run("--torch", "cpu", INSTALL="1")
    assert (status, done[0]) == (1, "make")
    assert "the first run needs a package index" in said
    status, done, _ = world.run("--torch", "cpu")
    assert (status, len(done)) == (0, 2)
    assert "make" not in done


def test_extras_are_added_and_never_taken_away(world: World) -> None:
    world.run("--torch", "cpu", "--extras", "worker")
    assert world.run("--torch", "cpu", "--extras", "worker,dev")[1][-1].endswith(".[dev,worker]")
    assert world.run("--torch", "cpu", "--extras", "worker")[1] == []


def test_the_build_that_was_asked_for_is_kept(world: World) -> None:
    """A later run that names none neither changes it nor installs again."""
    for build in ("cuda", "cpu"):
        assert len(world.run("--torch", build)[1]) > 0
        assert world.run() == (0, [], "")


def test_without_a_cpu_build_at_hand_pytorchs_own_index_is_asked(world: World) -> None:
    status, done, _ = world.run("--torch", "cpu", LOOK="1")
    assert status == 0
    assert done[2] == f"pip -qq --no-deps --index-url https://download.pytorch.org/whl/cpu torch=={TORCH}+cpu"
    assert done[3] == f"{PINNED} torch=={TORCH}+cpu -e .[worker]"


def test_without_any_cpu_build_the_cuda_build_is_not_taken_by_itself(world: World) -> None:
    status, done, said = world.run("--torch", "cpu", LOOK="1", INDEX="1")
    assert status == 1
    assert not any("-e" in line.split() for line in done)
    assert "about 2.5 GB" in said
    assert "--torch cuda" in said


def test_a_cpu_wheel_is_no_cuda_build(world: World) -> None:
    assert world.run("--torch", "cuda")[1][1:] == [f"{PINNED} torch=={TORCH},!={TORCH}+cpu -e .[worker]"]


def test_a_torch_that_is_there_is_kept_if_it_is_new_enough(world: World) -> None:
    status, _, said = world.run("--torch", "installed", TORCH="2.7.1")
    assert status == 1
    assert "torch 2.7.1, and 2.8 or newer is needed" in said
    status, done, _ = world.run("--torch", "installed", TORCH="2.9.0a0+nv25.10")
    assert status == 0
    assert done[-1].split()[-2:] == ["-e", ".[worker]"]
    assert f"{ROOT}/config/constraints.txt" not in done[-1], "the pin of torch is another one"


def test_without_a_network_no_index_is_asked(world: World) -> None:
    _, done, _ = world.run("--torch", "cpu", "--offline", LOOK="1")
    assert [line for line in done if "--no-index" not in line] == ["make"]


def test_the_router_alone_needs_no_torch(world: World) -> None:
    assert world.run("--extras", "")[1][1:] == [f"{PINNED} -e ."]
