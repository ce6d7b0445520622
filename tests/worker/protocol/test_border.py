"""Constants and tables that both sides need are defined once, in `worker.protocol`, and not again in either side."""

import ast
from collections.abc import Iterator
from pathlib import Path

from worker.protocol.architectures import DIVISIBLE, OFFSET_POSITIONS, PAGED, VISION

ROOT = Path(__file__).resolve().parents[3]
SIZES = ("_BYTES", "_TOKENS", "_SHARE", "_LOGITS", "_SCORES", "_FACTOR", "_GROUP", "_GROUPS", "_HEADER", "MIB", "PART")
# Limits of files and pipes that have the same name on both sides by chance.
UNRELATED = {"MOST_BYTES", "READ_BYTES", "WRITE_BYTES"}


def modules(package: str) -> Iterator[ast.Module]:
    """Each module of `package`, but for those of the protocol."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if not path.is_relative_to(ROOT / "worker" / "protocol"):
            yield ast.parse(path.read_text("utf-8"))


def constants(package: str) -> Iterator[tuple[str, ast.expr]]:
    """Name, without leading underscores, and value of each module-level constant in `package`."""
    for module in modules(package):
        for node in module.body:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target, value = node.target, node.value
            else:
                continue
            if isinstance(target, ast.Name) and target.id.isupper():
                yield target.id.lstrip("_"), value


def strings(value: ast.expr) -> frozenset[str]:
    """The strings of a set or tuple, or the keys of a mapping."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    entries = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return frozenset(entry.value for entry in entries if isinstance(entry, ast.Constant) and type(entry.value) is str)


def test_no_byte_constant_is_defined_on_both_sides() -> None:
    """Such a constant belongs to worker.protocol.memory."""
    router, worker = ({name for name, _ in constants(package)} for package in ("router", "worker"))
    assert {name for name in router & worker if name.endswith(SIZES)} - UNRELATED == set()


def test_no_table_of_families_is_defined_on_both_sides() -> None:
    """Such a table belongs to worker.protocol.architectures, under any name."""
    families = PAGED | DIVISIBLE | OFFSET_POSITIONS | VISION
    router, worker = (
        {names for _, value in constants(package) if len((names := strings(value)) & families) > 1}
        for package in ("router", "worker")
    )
    assert router & worker == set()
    assert (router | worker) & {PAGED, DIVISIBLE, OFFSET_POSITIONS} == set()


def test_no_table_of_names_is_defined_on_both_sides() -> None:
    """Such a table, for example of the values of an option, belongs to worker.protocol. Three names may agree by
    chance."""
    router, worker = (
        {
            names
            for module in modules(package)
            for node in ast.walk(module)
            if isinstance(node, ast.Dict | ast.List | ast.Set | ast.Tuple) and len(names := strings(node)) > 3
        }
        for package in ("router", "worker")
    )
    assert router & worker == set()
