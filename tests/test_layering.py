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
    "router.cli.main",
    "router.cli.serve",
    "router.http.app  router.launch.local",
    "router.http.dispatch",
    "router.api.adapters",
    "router.api.admin  router.api.lmi  router.api.ollama",
    "router.api  router.api.*  router.launch.fork_server",
    "router.api.anthropic  router.api.call  router.api.keepalive  router.api.status",
    "router.registry.pulls  router.fleet.preparation  router.api.request_log  router.bodies",
    "router.launch.worker_process",
    "router.launch.watchdog",
    "router.connections  router.registry.registry  router.http.proxy  router.http.metrics  router.launch.process",
    "router.registry.shared_workers",
    "router.fleet.fleet  router.registry.auth  router.launch.reaper",
    "router.fleet.admission  router.fleet.failures  router.fleet.sleep  router.fleet.prefetch",
    "router.fleet.lease",
    "router.fleet.explain  router.fleet.model  router.cli.estimate  router.registry.adapters  router.fleet.rejection_log",
    "router.launch.shared_reservations  router.launch.exit_causes",
    "router.fleet.lifecycle  router.launch.devices  router.launch.device_sampler  router.launch.pidfile",
    "router.fleet.load_cost  router.fleet.measurements",
    "router.fleet.worker_argv  router.registry.profiles",
    "router.fleet.interfaces",
    "router.fleet.worker",
    "router.fleet.errand  router.fleet.sleeping_weights",
    "router.store.snapshots",
    "router.memory.learned  router.store.hub_cache  router.launch.interface  router.launch.environment"
    "  router.launch.guard  router.launch.page_lock  router.launch.oom  router.launch.heartbeat",
    "router.fleet.early_start",
    "router.memory.sharding",
    "router.memory.tensor_parallel  router.planner.planner  router.memory.checkpoint  router.store.catalogue  router.store.converted  router.cli.hub_headers",
    "router.planner.placement  router.planner.eviction  router.planner.availability",
    "router.planner.types",
    "router.planner.ledger  router.memory.estimate  router.registry.aliases  router.paths",
    "router.memory.activations",
    "router.memory.weights",
    "router.memory.checkpoint_facts  router.memory.process  router.registry.sharing  router.http.listen  router.config.resolve",
    "router.config.effective  router.config.precedence",
    "router.config.preset_keys",
    "router.config.presets",
    "router.config.settings  router.config.preset_keys  router.config.kv_types  router.log",
    "router.cli.client  router.config.xdg  router.fleet.limits  router.api.openapi  router.api.static_page",
    "router.noted",
    "router.errors  router.events  router.fleet.state  router.fleet.backoff  router.config.ini  router.fleet.load_stages  router.config.option_types"
    "  router.config.lora_rank"
    "  router.http.listener  router.config.file_watcher  router.launch.worker_client",
    "router.door",
    "router",
]
WORKER = [
    "worker.program.main",
    "worker.estimate.tensor_parallel",
    "worker.estimate.estimate",
    "worker.estimate.quantized",
    "worker.program.fork_server  worker.fetch.download  worker.server.server",
    "worker.api.anthropic  worker.api.ollama  worker.api.responses  worker.api.ericllm  worker.api.lmi"
    "  worker.api.fastchat  worker.api.tokens  worker.api.cohere",
    "worker.api.call.*  worker.engines.transformers.engine",
    "worker.api.llama_server_replies  worker.engines.transformers.start",
    "worker.fetch.convert  worker.engines.transformers.prebuilt_models  worker.engines.transformers.load_generator  worker.engines.transformers.request_streams",
    "worker.api.call  worker.api.openai_replies  worker.engines.transformers.generation_loop  worker.engines.transformers.embedding  worker.engines.transformers.load_encoder",
    "worker.engines.transformers.run.tensor_parallel",
    "worker.engines.transformers.run.backends  worker.engines.transformers.step_launcher",
    "worker.engines.transformers.active_choices",
    "worker.engines.transformers.stream",
    "worker.engines.transformers.run.self_check",
    "worker.engines.transformers.run.aligned",
    "worker.engines.transformers.run.vision",
    "worker.engines.transformers.run.forward  worker.engines.transformers.run.aligned_cache",
    "worker.engines.transformers.run.cache_probe",
    "worker.engines.transformers.run.warmup",
    "worker.engines.transformers.run.cuda_graphs  worker.engines.transformers.run.in_flight_step",
    "worker.engines.transformers.load.loader",
    "worker.engines.transformers.load.placement  worker.engines.transformers.load.model_class",
    "worker.engines.transformers.run.runner  worker.engines.transformers.device.process_group  worker.engines.transformers.sample.grammar  worker.engines.transformers.sample.sampler"
    "  worker.engines.transformers.step_loop  worker.engines.transformers.run.pooling",
    "worker.engines.transformers.load.tensor_parallel_plan",
    "worker.engines.transformers.load.layer_split",
    "worker.engines.transformers.request_limits",
    "worker.engines.transformers.sample.vocabulary",
    "worker.engines.transformers.load.lora  worker.engines.transformers.attention.quantized_kv_pool",
    "worker.engines.transformers.attention.paged",
    "worker.engines.transformers.attention.decode_plan",
    "worker.engines.transformers.attention.kv_pool  worker.engines.transformers.attention.dense  worker.engines.transformers.attention.cpu_linear  worker.engines.transformers.load.staging"
    "  worker.engines.transformers.load.lora_files"
    "  worker.engines.transformers.schedule.prefill_budget  worker.engines.transformers.load.quantization  worker.engines.transformers.load.snapshot",
    "worker.engines.transformers.schedule.scheduler  worker.engines.transformers.attention.cpu_attention  worker.engines.transformers.sample.topk",
    "worker.engines.transformers.schedule.kv_cache",
    "worker.engines.transformers.schedule.sequence  worker.engines.transformers.load.architectures  worker.engines.transformers.load.safetensors  worker.engines.transformers.device.memory"
    "  worker.engines.transformers.sample.device_to_host"
    "  worker.engines.transformers.load.sentence_transformers_config  worker.engines.transformers.device.lazy_pages  worker.engines.transformers.schedule.encoder_batches  worker.engines.transformers.schedule.aligned_layout"
    "  worker.engines.transformers.attention.quantized_kv_types",
    "worker.engines.transformers.schedule.lora_slots  worker.engines.transformers.device.process_overhead  worker.engines.transformers.device.cuda_errors",
    "worker.engines.transformers.device.nvml",
    "worker.prompt.chat_template  worker.prompt.response_parser  worker.prompt.tools",
    "worker.detokenizer  worker.prompt.sampling_options  worker.prompt.guided_decoding  worker.prompt.chat_formats  worker.prompt.adapter_choice  worker.prompt.logprob_options"
    "  worker.prompt.fill_in_the_middle",
    "worker.prompt.llama_server_samplers  worker.prompt.closed_schemas",
    "worker.prompt.body_reader  worker.server.merge",
    "worker.interface",
    "worker.images  worker.engines.transformers.device.rank_processes  worker.fetch.transfer",
    "worker.fetch.hub_cache",
    "worker.program.supervision  worker.engines.transformers.load.page_cache  worker.errors  worker.server.connection  worker.program.help  worker.fetch.demo  worker.estimate.memory_tracer"
    "  worker.fetch.disk_reservation",
    "worker  worker.engines.transformers",
]

PURE = [
    "router.memory.activations", "router.memory.checkpoint_facts", "router.fleet.limits", "router.memory.process", "router.memory.weights",
    "router.errors", "router.memory.estimate", "router.config.ini", "router.config.preset_keys", "router.config.kv_types", "router.planner.ledger",
    "router.fleet.state", "router.fleet.backoff", "router.memory.tensor_parallel", "router.registry.aliases", "router.api.openapi",
    "router.paths", "router.planner.placement", "router.planner.planner", "router.planner.types", "router.config.presets", "router.config.settings",
    "router.config.effective", "router.config.precedence", "router.config.resolve",
    "router.memory.sharding", "router.fleet.load_stages", "router.fleet.early_start", "router.config.option_types", "router.planner.eviction", "router.planner.availability",
    "router.config.lora_rank", "router.registry.sharing", "router.launch.environment", "router.launch.heartbeat",
    "worker.prompt.adapter_choice", "worker.prompt.closed_schemas", "worker.prompt.guided_decoding", "worker.detokenizer", "worker.errors",
    "worker.prompt.chat_formats", "worker.prompt.body_reader", "worker.prompt.fill_in_the_middle", "worker.interface", "worker.images", "worker.prompt.llama_server_samplers",
    "worker.prompt.sampling_options", "worker.prompt.logprob_options", "worker.prompt.tools",
    "worker.engines.transformers.schedule.aligned_layout", "worker.engines.transformers.load.architectures", "worker.engines.transformers.schedule.encoder_batches", "worker.engines.transformers.schedule.kv_cache",
    "worker.engines.transformers.schedule.prefill_budget", "worker.engines.transformers.schedule.scheduler",
    "worker.engines.transformers.schedule.sequence", "worker.engines.transformers.schedule.lora_slots",
]  # fmt: skip
IMPURE = {"asyncio", "aiohttp", "os", "subprocess", "socket", "time", "random", "logging", "pynvml", "torch"}
WITH_TORCH = [
    "worker.engines.transformers.*",
    "worker.estimate.tensor_parallel",
    "worker.estimate.estimate",
    "worker.estimate.memory_tracer",
    "worker.program.fork_server",
    "worker.estimate.quantized",
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
        "router.launch.devices",
        "worker.engines.transformers.device.nvml",
    }


def test_a_router_never_loads_torch() -> None:
    code = "import sys, router.http.app, router.cli.serve, router.cli.main; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
