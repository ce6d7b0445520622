"""Create the virtual environment that run.sh and test.sh use. If it is complete, return within a fraction of a second.

    python3 scripts/bootstrap.py                                  .venv, for running
    python3 scripts/bootstrap.py --extras worker,dev              also for testing
    python3 scripts/bootstrap.py --torch cuda                     the build of torch to use, kept for the next time
    BOOTSTRAP_PYTHON=/opt/python3.12/bin/python3 scripts/run.sh   another interpreter

Standard library only, and only syntax that Python 3.7 can parse, so that an old interpreter prints the reason of its
rejection. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "config" / "constraints.txt"
STAMP = ".bootstrap.json"
"""File in the environment that marks it as ours. Its content, written last, lists what was installed."""

OLDEST = (3, 11)
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3")
OLDEST_TORCH = (2, 8)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_SIZE = "about 2.5 GB to download"
NEED_TORCH = {"worker", "gptq", "auto-gptq", "bitsandbytes"}
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


class Missing(Exception):
    """The bootstrap failed. The message is one sentence: what is missing, and the remedy."""


def say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def main() -> int:
    options = arguments()
    venv = Path(os.path.abspath(options.venv))
    try:
        extras = known_extras(options.extras)
        with locked(venv):
            bootstrap(venv, extras, options.torch, offline=options.offline)
    except Missing as failure:
        say(str(failure))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on where this one stopped")
        return 130
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make or check the virtual environment of the fleet router.")
    parser.add_argument("--extras", default="worker", metavar="A,B", help="sets of pyproject.toml (default: worker)")
    parser.add_argument(
        "--torch",
        default="auto",
        choices=("auto", "cpu", "cuda", "installed"),
        help="auto: cuda with an NVIDIA driver, else cpu; installed: keep the interpreter's or environment's own",
    )
    parser.add_argument("--venv", default=str(ROOT / ".venv"), metavar="DIR", help="where (default: .venv)")
    parser.add_argument("--offline", action="store_true", help="use no package index, only folders of wheels")
    return parser.parse_args()


def known_extras(text: str) -> list[str]:
    """The extras named in `text`, sorted. Raises Missing for one that pyproject.toml does not have."""
    section = PYPROJECT.read_text("utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = re.findall(r"^([a-z0-9-]+) *=", section, re.MULTILINE)
    wanted = sorted({part.strip() for part in text.split(",") if part.strip()})
    for extra in wanted:
        if extra not in known:
            raise Missing(f"there is no extra {extra!r}; pyproject.toml has {', '.join(known)}")
    return wanted


@contextlib.contextmanager
def locked(venv: Path) -> Iterator[None]:
    """Hold the lock of `venv`. Waits while another process holds it."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"waiting for another bootstrap of {venv}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def bootstrap(venv: Path, extras: list[str], torch: str, *, offline: bool) -> None:
    have = read_stamp(venv)
    chosen = torch if torch != "auto" else have.get("chosen", "auto")
    build = {"auto": "cuda" if has_driver() else "cpu"}.get(chosen, chosen)
    asked = os.environ.get("BOOTSTRAP_PYTHON", "")
    if is_current(venv, have, extras, build, asked):
        return
    began = time.monotonic()
    everything = sorted({*extras, *have.get("extras", [])})
    python = make_environment(venv, have, asked, system_packages=build == "installed")
    install(python, everything, build, offline=offline)
    check(python, everything, build)
    stamp = {"digest": digest(venv, build), "chosen": chosen, "extras": everything, "interpreter": asked}
    (venv / STAMP).write_text(json.dumps(stamp) + "\n", "utf-8")
    say(f"{venv} is ready after {time.monotonic() - began:.0f} s")


# --- the existing environment ----------------------------------------------------------------------------------------


def read_stamp(venv: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((venv / STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_current(venv: Path, have: dict[str, Any], extras: list[str], build: str, asked: str) -> bool:
    return (
        set(extras) <= set(have.get("extras", []))
        and is_asked_for(venv, have, asked)
        and (venv / "bin" / "python").exists()
        and have.get("digest") == digest(venv, build)
    )


def is_asked_for(venv: Path, have: dict[str, Any], asked: str) -> bool:
    """True if `venv` runs on the interpreter that BOOTSTRAP_PYTHON names, or on one of the same version."""
    return asked in ("", have.get("interpreter")) or probe(asked)[0] == venv_version(venv)


def digest(venv: Path, build: str) -> str:
    """Hash of everything that decides what is installed, except the extras."""
    found = hashlib.sha256()
    for part in (PYPROJECT, CONSTRAINTS, Path(__file__)):
        found.update(part.read_bytes() + b"\0")
    found.update(f"{ROOT}\0{build}\0{venv_version(venv)}".encode())
    return found.hexdigest()


def venv_version(venv: Path) -> str:
    """The Python version in pyvenv.cfg; empty without such a file."""
    try:
        text = (venv / "pyvenv.cfg").read_text("utf-8")
    except OSError:
        return ""
    match = re.search(r"^version\w* *= *(\S+)", text, re.MULTILINE)
    return match.group(1) if match else ""


def has_driver() -> bool:
    return any(os.path.exists(path) for path in DRIVER_FILES)


# --- interpreter and environment -------------------------------------------------------------------------------------


def probe(command: str) -> tuple[str, bool]:
    """Version of the interpreter `command` (empty if it does not run), and True if it can create environments."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3], flush=True); import ensurepip, venv"
    try:
        done = subprocess.run([command, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    except OSError:
        return "", False
    return done.stdout.strip(), done.returncode == 0


def choose_interpreter(asked: str) -> str:
    """The first interpreter that is new enough and has venv: `asked`, else of INTERPRETERS. Raises Missing."""
    seen = {command: probe(command) for command in ((asked,) if asked else INTERPRETERS)}
    for command, (version, complete) in seen.items():
        if complete and numbers(version) >= OLDEST:
            return command
    for command, (version, _) in seen.items():
        if version and numbers(version) >= OLDEST:
            short = ".".join(version.split(".")[:2])
            raise Missing(f"{command} has no venv module; install it (Debian, Ubuntu: apt install python{short}-venv)")
    found = [f"{command} is {version}" for command, (version, _) in seen.items() if version]
    instead = "; " + ", ".join(found) if found else f"; {asked} does not run" if asked else ""
    raise Missing(
        f"Python 3.11 or newer is needed{instead}. Install one, or name one: BOOTSTRAP_PYTHON=/path/to/python3.12"
    )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def make_environment(venv: Path, have: dict[str, Any], asked: str, *, system_packages: bool) -> str:
    """The interpreter of a working environment in `venv`, which is created if necessary. Raises Missing."""
    python = str(venv / "bin" / "python")
    ours = (venv / STAMP).exists()
    version, _ = probe(python)
    works = numbers(version) >= OLDEST and runs([python, "-m", "pip", "--version"])
    if works and (not ours or is_asked_for(venv, have, asked)):
        return python
    if not ours and venv.exists() and any(venv.iterdir()):
        raise Missing(
            f"{venv} is not empty and was not created by this script; remove it, or name another folder with --venv DIR"
        )
    interpreter = choose_interpreter(asked)
    say(f"making {venv} with {interpreter}")
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    (venv / STAMP).write_text("{}\n", "utf-8")
    command = [interpreter, "-m", "venv", *(["--system-site-packages"] if system_packages else []), str(venv)]
    if subprocess.run(command, env=environment(), stdout=sys.stderr, check=False).returncode:
        raise Missing(f"{' '.join(command)} failed, see above; BOOTSTRAP_PYTHON names another interpreter")
    return python


def environment() -> dict[str, str]:
    """The environment of this process, without variables that redirect an interpreter's packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}


def runs(command: list[str], cwd: Path | None = None) -> bool:
    done = subprocess.run(command, env=environment(), cwd=cwd, capture_output=True, check=False)
    return done.returncode == 0


# --- packages --------------------------------------------------------------------------------------------------------


def install(python: str, extras: list[str], build: str, *, offline: bool) -> None:
    """Install torch in the build `build`, then all other packages in one call of pip. Raises Missing."""
    torch: list[str] = []
    replaced: dict[str, str] = {}
    if NEED_TORCH & set(extras):
        if build == "installed":
            replaced = {"torch": installed_torch(python)}
        else:
            torch = [torch_requirement(python, build, offline=offline)]
    say(f"installing {', '.join(['router', *extras])}; the first time this takes a minute or two")
    wanted = f".[{','.join(extras)}]" if extras else "."
    with constraints(replaced) as file:
        done = pip(python, "-c", file, *torch, "-e", wanted, offline=offline)
    if not done:
        raise Missing(
            "the packages could not be installed, see above; the first run needs a package index"
            " (check the network), or a folder of wheels named by PIP_FIND_LINKS"
        )


def torch_requirement(python: str, build: str, *, offline: bool) -> str:
    """The requirement of torch for pip. Installs the CPU build directly if pip's sources do not offer it."""
    version = pinned("torch")
    if build == "cuda":
        return f"torch=={version},!={version}+cpu"
    local = f"torch=={version}+cpu"
    if runs([python, "-m", "pip", "install", "--dry-run", "--no-deps", *(["--no-index"] * offline), local]):
        return local
    say(f"no CPU build of torch among pip's own sources; asking {CPU_INDEX}")
    if offline or not pip(python, "--no-deps", "--index-url", CPU_INDEX, local, offline=False):
        raise Missing(
            f"no CPU build of torch {version} was found, neither at pip's own sources nor at {CPU_INDEX}. The build for"
            f" CUDA would be {CUDA_SIZE}: install it with scripts/bootstrap.py --torch cuda, or name a folder with the"
            " CPU wheel by PIP_FIND_LINKS"
        )
    return local


def installed_torch(python: str) -> str:
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-P", "-c", code], env=environment(), capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    if done.returncode or numbers(version) < OLDEST_TORCH:
        raise Missing(
            f"--torch installed: the environment has {f'torch {version}' if version else 'no torch'}, and 2.8 or newer"
            " is needed; install one, or choose --torch cpu or --torch cuda"
        )
    return version


def pinned(name: str) -> str:
    match = re.search(rf"^{name}==(\S+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    if not match:
        raise Missing(f"{CONSTRAINTS} has no pin of {name}; make it anew with scripts/refresh_constraints.sh")
    return match.group(1)


@contextlib.contextmanager
def constraints(replaced: dict[str, str]) -> Iterator[str]:
    """Path of constraints.txt, or of a copy with other versions for the packages of `replaced`."""
    text = CONSTRAINTS.read_text("utf-8")
    for name, version in replaced.items():
        text = re.sub(rf"^{name}==\S+", f"{name}=={version}", text, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "constraints.txt"
        copy.write_text(text, "utf-8")
        yield str(copy if replaced else CONSTRAINTS)


def pip(python: str, *arguments: str, offline: bool) -> bool:
    """Run `pip install` with `arguments`, its output on stderr. True if it succeeded."""
    command = [python, "-m", "pip", "install", *([] if sys.stderr.isatty() else ["-qq"]), *arguments]
    if offline:
        command.append("--no-index")
        if runs([python, "-P", "-c", "import hatchling"]):
            command.append("--no-build-isolation")
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=sys.stderr, check=False)
    return done.returncode == 0


def check(python: str, extras: list[str], build: str) -> None:
    """Check that both packages come from this checkout, that torch is installed, and that the router does not load it.

    Raises Missing.
    """
    elsewhere = Path(python).parent  # a folder that holds neither `router` nor `worker`
    code = (
        "import pathlib, sys\n"
        "import router.cli.main, worker\n"
        "for package in (sys.modules['router'], worker):\n"
        "    home = pathlib.Path(package.__file__).resolve().parent.parent\n"
        "    if home != pathlib.Path(sys.argv[1]):\n"
        "        sys.exit(f'{package.__name__} comes from {home}, not from this checkout; use --venv DIR')\n"
        "if 'torch' in sys.modules:\n"
        "    sys.exit('router.cli.main imports torch, which only workers may')\n"
    )
    command = [python, "-P", "-c", code, str(ROOT)]
    done = subprocess.run(command, cwd=elsewhere, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the router cannot be imported")
    if not NEED_TORCH & set(extras):
        return
    command = [python, "-P", "-c", "import torch, transformers; print(torch.__version__)"]
    done = subprocess.run(command, cwd=elsewhere, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        cause = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise Missing(f"torch ({build}) was installed but cannot be imported: {cause[0]}; try another --torch")


if __name__ == "__main__":
    sys.exit(main())
