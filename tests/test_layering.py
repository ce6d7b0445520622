"""The import order of both packages and the list of pure packages, read from the source (late imports included)."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A package imports only from packages to its right. Names between commas do not import each other.
ROUTER = "cli > http > api > registry > fleet > store > memory > launch, config > planner > log > events, errors"
WORKER = (
    "program > fetch, estimate, server > api > prompt > engines > interface > detokenizer, images > errors > protocol"
)

# No asyncio, files, processes, sockets, randomness, logging or clock: time is an argument.
PURE = (
    "router.config.ini",
    "router.errors",
    "router.planner",
    "worker.engines.transformers.schedule",
    "worker.images",
    "worker.interface",
    "worker.detokenizer",
    "worker.errors",
    "worker.protocol",
)
IMPURE = {"asyncio", "aiohttp", "os", "subprocess", "socket", "time", "random", "logging", "pynvml", "torch"}


def modules() -> dict[str, Path]:
    """Every module of both packages, by its dotted name."""
    found = {}
    for package in ("router", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> frozenset[str]:
    """Full names of the modules that `name` imports: a module of ours where there is one, else the text as written."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return frozenset(found)


def place(name: str, order: str) -> int | None:
    """Position of the package of module `name` in `order`, from the left. None for `__main__` and the top package."""
    package = name.split(".")[1] if "." in name else ""
    for number, tier in enumerate(order.split(" > ")):
        if package in tier.split(", "):
            return number
    assert package in ("", "__main__"), f"{name} has no place in the import order"
    return None


@pytest.mark.parametrize(("top", "order"), [("router", ROUTER), ("worker", WORKER)])
def test_a_package_imports_only_from_packages_to_its_right(top: str, order: str) -> None:
    wrong = []
    for name in MODULES:
        here = place(name, order) if name.startswith(top) else None
        for other in imports(name):
            if here is None or other not in MODULES or not other.startswith(f"{top}."):
                continue
            there = place(other, order)
            same_package = name.split(".")[1] == other.split(".")[1]
            if not same_package and (there is None or there <= here):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_the_router_imports_nothing_of_the_worker_but_the_protocol() -> None:
    wrong = {
        (name, found)
        for name in MODULES
        if name.startswith("router")
        for found in imports(name)
        if found.partition(".")[0] == "worker" and not f"{found}.".startswith("worker.protocol.")
    }
    assert wrong == set()


def test_the_worker_imports_nothing_of_the_router() -> None:
    wrong = [
        name
        for name in MODULES
        if name.startswith("worker") and any(f.partition(".")[0] == "router" for f in imports(name))
    ]
    assert wrong == []


def test_the_protocol_needs_only_the_standard_library() -> None:
    tops = {
        found.partition(".")[0]
        for name in MODULES
        if name.startswith("worker.protocol")
        for found in imports(name)
        if not f"{found}.".startswith("worker.protocol.")
    }
    assert tops - sys.stdlib_module_names == set()


def is_pure(name: str) -> bool:
    return any(f"{name}.".startswith(f"{pure}.") for pure in PURE)


@pytest.mark.parametrize("name", [name for name in MODULES if is_pure(name)])
def test_a_pure_module_cannot_act_by_itself_or_through_another(name: str) -> None:
    found = imports(name)
    assert {each.partition(".")[0] for each in found} & IMPURE == set()
    assert {each for each in found if each in MODULES and "." in each and not is_pure(each)} == set()


def test_the_router_process_never_loads_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, router\n"
        "for each in pkgutil.walk_packages(router.__path__, 'router.'):\n"
        "    if not each.name.endswith('__main__'): importlib.import_module(each.name)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
