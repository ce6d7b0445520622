"""The law of layers: who may import whom. Read from the source, so that late imports count too."""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From top to bottom; a module imports only from lines below its own. A pattern stands for all modules that it matches
# and no line names.
ROUTER = [
    "router.__main__",
    "router.cli",
    "router.serve",
    "router.app  router.launchers.local",
    "router.dispatch",
    "router.faces.lmi_adapters",
    "router.faces.admin  router.faces.lmi  router.faces.ollama",
    "router.faces  router.faces.*  router.launchers.nursery",
    "router.faces.anthropic  router.faces.call  router.faces.pings  router.faces.status",
    "router.hub  router.preparation  router.requests  router.bodies",
    "router.launchers.serving",
    "router.launchers.watching",
    "router.connections  router.site  router.proxy  router.metrics  router.launchers.process",
    "router.members",
    "router.fleet  router.access  router.launchers.orphans",
    "router.queue  router.failures  router.sleepers  router.reading_ahead",
    "router.lease",
    "router.explain  router.model  router.forecast  router.adapters  router.refusals",
    "router.launchers.neighbours  router.launchers.losses",
    "router.life  router.launchers.devices  router.launchers.probe  router.launchers.record",
    "router.costs  router.learning",
    "router.commands  router.profiles",
    "router.world",
    "router.worker",
    "router.errand  router.holding",
    "router.snapshots",
    "router.calibration  router.hubcache  router.launchers  router.launchers.environment"
    "  router.launchers.guard  router.launchers.keeper  router.launchers.oom  router.launchers.vitals",
    "router.standby",
    "router.split",
    "router.divided  router.planner  router.checkpoint  router.catalogue  router.conversions  router.remote",
    "router.places  router.victims  router.views",
    "router.plans",
    "router.ledger  router.estimate  router.names  router.paths",
    "router.compute",
    "router.weights",
    "router.facts  router.overhead  router.sharing  router.sockets  router.sections",
    "router.written  router.layers",
    "router.keys",
    "router.presets",
    "router.settings  router.keys  router.kv_types  router.log",
    "router.client  router.folders  router.limits  router.openapi  router.page",
    "router.noted",
    "router.errors  router.events  router.lifecycle  router.backoff  router.ini  router.stages  router.values"
    "  router.ranks"
    "  router.listener  router.watch  router.wire",
    "router.door",
    "router",
]
WORKER = [
    "worker.__main__",
    "worker.divided",
    "worker.estimate",
    "worker.packed",
    "worker.nursery  worker.download  worker.server",
    "worker.faces.anthropic  worker.faces.ollama  worker.faces.responses  worker.faces.ericllm  worker.faces.lmi"
    "  worker.faces.fastchat  worker.faces.tokens  worker.faces.cohere",
    "worker.faces.*  worker.engine.engine",
    "worker.native  worker.engine.start",
    "worker.engine.conversion  worker.engine.shelf  worker.engine.generators  worker.engine.requests",
    "worker.faces  worker.replies  worker.engine.generating  worker.engine.embedding  worker.engine.encoders",
    "worker.engine.lockstep",
    "worker.engine.backends  worker.engine.launcher",
    "worker.engine.active",
    "worker.engine.stream",
    "worker.engine.trial",
    "worker.engine.aligned",
    "worker.engine.vision",
    "worker.engine.forward  worker.engine.aligned_cache",
    "worker.engine.kept",
    "worker.engine.warmup",
    "worker.engine.graphs  worker.engine.flight",
    "worker.engine.loader",
    "worker.engine.placement  worker.engine.model_class",
    "worker.engine.runner  worker.engine.peers  worker.engine.grammar  worker.engine.sampler"
    "  worker.engine.steploop  worker.engine.pooling",
    "worker.engine.slices",
    "worker.engine.split",
    "worker.engine.bounds",
    "worker.engine.vocabulary",
    "worker.engine.adapters  worker.engine.compact",
    "worker.engine.attention",
    "worker.engine.decode_plan",
    "worker.engine.kv_pool  worker.engine.dense_attention  worker.engine.linears  worker.engine.staging"
    "  worker.engine.lora_files"
    "  worker.engine.pace  worker.engine.packing  worker.engine.snapshot",
    "worker.engine.scheduler  worker.engine.kernels  worker.engine.search",
    "worker.engine.kv_cache",
    "worker.engine.sequence  worker.engine.architectures  worker.engine.weights  worker.engine.memory"
    "  worker.engine.readout"
    "  worker.engine.layout  worker.engine.claims  worker.engine.batching  worker.engine.alignment"
    "  worker.engine.cache_types",
    "worker.engine.slots  worker.engine.overhead  worker.engine.faults",
    "worker.engine.driver",
    "worker.chat  worker.parts  worker.tools",
    "worker.detokenize  worker.sampling  worker.constraints  worker.families  worker.adapting  worker.telling"
    "  worker.filling",
    "worker.samplers  worker.closing",
    "worker.fields  worker.deltas",
    "worker.generation",
    "worker.images  worker.ranks  worker.transfer",
    "worker.hub_cache",
    "worker.leash  worker.pagecache  worker.errors  worker.connection  worker.help  worker.demo  worker.live_bytes"
    "  worker.room",
    "worker  worker.engine",
]

PURE = [
    "router.compute", "router.facts", "router.limits", "router.overhead", "router.weights",
    "router.errors", "router.estimate", "router.ini", "router.keys", "router.kv_types", "router.ledger",
    "router.lifecycle", "router.backoff", "router.divided", "router.names", "router.openapi",
    "router.paths", "router.places", "router.planner", "router.plans", "router.presets", "router.settings",
    "router.written", "router.layers", "router.sections",
    "router.split", "router.stages", "router.standby", "router.values", "router.victims", "router.views",
    "router.ranks", "router.sharing", "router.launchers.environment", "router.launchers.vitals",
    "worker.adapting", "worker.closing", "worker.constraints", "worker.detokenize", "worker.errors",
    "worker.families", "worker.fields", "worker.filling", "worker.generation", "worker.images", "worker.samplers",
    "worker.sampling", "worker.telling", "worker.tools",
    "worker.engine.alignment", "worker.engine.architectures", "worker.engine.batching", "worker.engine.kv_cache",
    "worker.engine.pace", "worker.engine.scheduler",
    "worker.engine.sequence", "worker.engine.slots",
]  # fmt: skip
IMPURE = {"asyncio", "aiohttp", "os", "subprocess", "socket", "time", "random", "logging", "pynvml", "torch"}
WITH_TORCH = [
    "worker.engine.*",
    "worker.divided",
    "worker.estimate",
    "worker.live_bytes",
    "worker.nursery",
    "worker.packed",
]


def modules() -> dict[str, Path]:
    """Every module of both packages, by name."""
    found = {}
    for package in ("router", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
BORDER = {name for name in MODULES if name == "worker.protocol" or name.startswith("worker.protocol.")}
"""Imported by router and workers; it imports nothing else of the project."""


def imports(name: str) -> Iterator[str]:
    """Full names of what module `name` imports: a module of ours where it is one, else what was written."""
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def own_imports(name: str) -> set[str]:
    return {found for found in imports(name) if found in MODULES and found != name}


def tops(name: str) -> set[str]:
    """The packages, ours or not, that `name` imports from."""
    return {found.partition(".")[0] for found in imports(name)}


def layer(name: str, layers: list[str]) -> int | None:
    """Which line of `layers` names the module: exactly, or else by a pattern."""
    for match in (str.__eq__, fnmatch.fnmatchcase):
        for number, line in enumerate(layers):
            if any(match(name, pattern) for pattern in line.split()):
                return number
    return None


def layers_of(name: str) -> list[str]:
    return ROUTER if name.partition(".")[0] == "router" else WORKER


def test_every_module_has_its_layer() -> None:
    assert [name for name in MODULES if name not in BORDER and layer(name, layers_of(name)) is None] == []


def test_a_module_imports_only_from_layers_below() -> None:
    wrong = []
    for name in MODULES:
        layers = layers_of(name)
        for other in own_imports(name) - BORDER:
            mine, theirs = layer(name, layers), layer(other, layers)
            if name not in BORDER and theirs is not None and (mine is None or theirs <= mine):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_the_border_imports_nothing_else_of_the_project() -> None:
    assert {name: own_imports(name) - BORDER for name in BORDER} == {name: set() for name in BORDER}


def test_the_border_needs_only_the_standard_library() -> None:
    others = {name: tops(name) - sys.stdlib_module_names - {"worker"} for name in BORDER}
    assert others == {name: set() for name in BORDER}


def test_the_router_imports_only_the_border_of_the_worker() -> None:
    crossing = {
        (name, found)
        for name in MODULES
        if name.startswith("router")
        for found in imports(name)
        if found.partition(".")[0] == "worker" and found not in BORDER
    }
    assert crossing == set()


def test_the_worker_imports_nothing_of_the_router() -> None:
    assert [name for name in MODULES if name.startswith("worker") and "router" in tops(name)] == []


@pytest.mark.parametrize("name", [name for name in (*PURE, *sorted(BORDER)) if name in MODULES])
def test_a_pure_module_cannot_act(name: str) -> None:
    assert tops(name) & IMPURE == set()


@pytest.mark.parametrize("name", [name for name in (*PURE, *sorted(BORDER)) if name in MODULES])
def test_a_pure_module_does_not_act_through_another(name: str) -> None:
    """Pure modules import only pure modules of ours, and the border."""
    pure = {*PURE, *BORDER, "router", "worker"}
    assert own_imports(name) - pure == set()


def test_a_module_that_calls_itself_pure_is_held_to_it() -> None:
    opening = {name: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for name, path in MODULES.items()}
    assert {name for name, text in opening.items() if "Law: PURE" in text} - set(PURE) == set()


def test_torch_stays_where_tokens_are_computed() -> None:
    allowed = {name for name in MODULES if any(fnmatch.fnmatchcase(name, pattern) for pattern in WITH_TORCH)}
    assert {name for name in MODULES if "torch" in tops(name)} - allowed == set()


def test_one_module_of_each_package_speaks_to_the_driver() -> None:
    assert {name for name in MODULES if "pynvml" in tops(name)} <= {
        "router.launchers.devices",
        "worker.engine.driver",
    }


def test_a_router_never_loads_torch() -> None:
    code = "import sys, router.app, router.serve, router.cli; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
