"""`router estimate`: the memory of a model on this machine, without a server.

No weights are loaded, and of a repository that is not in the cache only headers are fetched. The exact estimate comes
from the worker program.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from router.cli.estimate_report import DeviceReport, Report, device_line
from router.cli.worker_program import WorkerProgramError, run_worker
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.errors import LoadFailed, RouterError
from router.fleet import worker_argv
from router.launch.devices import Devices
from router.launch.spawn import may_fork
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.checkpoint_facts import Checkpoint, serves_embeddings
from router.memory.estimate import RUNTIME_FORKED, RUNTIME_HOST, MemoryEstimate
from router.memory.learned import LearnedEstimates
from router.memory.remedies import Remedies, remedies
from router.memory.sharding import allowed_devices, best_estimate, capacities, device_order, first_fitting
from router.planner.ledger import HOST, MAIN_MEMORY, DeviceId, Reading
from router.store.snapshots import Snapshots
from worker.protocol.architectures import VERIFIED, VISION
from worker.protocol.argv import Estimate
from worker.protocol.events import Downloaded, Estimated, Exit
from worker.protocol.memory import FORK_SERVER_BYTES, LIBRARY_CODE_BYTES


class EstimateFailed(RouterError):
    """No estimate can be made."""


class Machine:
    """The settings, the devices and the recorded estimates of this machine. Blocks on the driver."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], state: Path):
        self.settings, self.environ = settings, environ
        with contextlib.closing(Devices(environ)) as devices:
            self.readings = devices.read()
            self._margins = devices.by_device(settings.models_memory_margin, "--models-memory-margin")
            self._limits = devices.by_device(settings.device_limit, "--device-limit")
        if settings.fork_server:
            shared = FORK_SERVER_BYTES + LIBRARY_CODE_BYTES
            self.readings = [replace(each, shared=shared) if each.id.index == HOST else each for each in self.readings]
        self.capacities = capacities(self.readings, self._margin, self._limits.get)
        self.records = LearnedEstimates(state / "estimates.json", driver=devices.driver)
        self.snapshots = Snapshots(cache=settings.hub_cache, state=state, offline=True, prepare=settings.prepare)

    def _margin(self, device: DeviceId) -> int:
        return self._margins.get(device, self.settings.margin(""))

    def forks(self, preset: Preset) -> bool:
        return self.settings.fork_server and may_fork(worker_argv.program_of(preset, preset.id), "serve")

    def estimate(
        self, preset: Preset, facts: Checkpoint, choice: sharding.Choice, *, learns: bool = True
    ) -> MemoryEstimate:
        """The best estimate without a run of the worker program. Without `learns`, learned figures are left out. Raises
        EstimateError."""
        forked, threads = self.forks(preset), _threads(preset, choice)
        return best_estimate(
            choice, facts, preset, self.readings, self.records, forked=forked, threads=threads, or_executed=True,
            learns=learns,
        )  # fmt: skip

    def static(self, preset: Preset, facts: Checkpoint, choice: sharding.Choice) -> MemoryEstimate:
        """The static estimate, with the process overhead that was measured on this machine. Raises EstimateError."""
        forked = self.forks(preset)
        overhead = self.records.overhead(sharding.device_type(choice, self.readings), forked=forked)
        threads = _threads(preset, choice)
        return sharding.static_estimate(choice, facts, preset, threads=threads, forked=forked, overhead=overhead)

    def exact(self, preset: Preset, facts: Checkpoint, choice: sharding.Choice, folder: Path) -> MemoryEstimate:
        """The estimate of the worker program; that of the preset if it has its own. Raises RouterError."""
        first, forked = self.static(preset, facts, choice), self.forks(preset)
        if first.source == "preset":
            return first
        command = worker_argv.model_options(
            Estimate,
            preset,
            facts,
            str(folder),
            on_host=choice.on_host,
            layers=choice.layers,
            ranks=choice.ranks,
            overhead=first.overhead.device,
            host_overhead=0 if choice.on_host else first.overhead.beside_device(forked=forked),
        )
        traced = run_worker(preset, command, Estimated, self.environ)
        if forked:
            # The traced process was executed, so it could not measure what a forked worker shares with the fork server.
            shared = RUNTIME_HOST - RUNTIME_FORKED
            traced = replace(traced, inherited=int(shared / estimates.INHERITED_SHARE))
        return estimates.from_trace(traced, preset, forked=forked, first=first)

    def report(self, reading: Reading, needs: int, bounds: Mapping[DeviceId, int], keys: str) -> DeviceReport:
        """`keys`: those of the preset that `bounds` come from."""
        margin, capacity = self._margin(reading.id), self.capacities[reading.id]
        usable = min(capacity, bounds.get(reading.id, capacity))
        free = max(0, min(usable, reading.total - margin - reading.used))
        limited_by = keys if usable < capacity else ""
        limit = self._limits.get(reading.id)
        return DeviceReport(
            str(reading.id), reading.name, needs, reading.total, margin, usable, free, limit, limited_by
        )


def report(preset: Preset, machine: Machine, *, exact: bool = False, forget: bool = False) -> Report:
    """Estimate the memory of a preset. Blocks on the disk, the hub and the worker program. Raises RouterError.

    `forget`: first drop what was learned of its files.
    """
    allowed = allowed_devices(preset, machine.readings)
    on_host = all(device.index == HOST for device in allowed)
    with tempfile.TemporaryDirectory(prefix="router-estimate-") as temporary:
        folder, files = _files(preset, machine, Path(temporary))
        is_downloaded = files == str(folder)
        if is_downloaded:
            folder = Path(machine.snapshots.loads_from(preset, files))  # a conversion may take another size
        elif exact:
            raise EstimateFailed(f"{preset.id}: --exact needs the files here; `router` fetches them on first use")
        facts = machine.snapshots.facts(folder, preset)
        if forget:
            machine.records.forget(facts)
        order = device_order(preset, machine.readings, allowed)
        room = sharding.within_utilization(preset, machine.readings, machine.capacities)
        bounds = sharding.within_gpu_split(preset, order, room)

        def choose(*, learns: bool) -> tuple[sharding.Choice, MemoryEstimate, bool]:
            def estimate_of(choice: sharding.Choice) -> MemoryEstimate:
                if exact:
                    return machine.exact(preset, facts, choice, folder)
                return machine.estimate(preset, facts, choice, learns=learns)

            choices = sharding.choices(facts, preset, allowed, order, room)
            choice, found = first_fitting(choices, estimate_of, bounds, can_wait=lambda _: False)
            has_host = on_host or found.host <= machine.capacities[MAIN_MEMORY]
            return choice, found, has_host and sharding.fits(choice, found.shards, bounds)

        choice, estimate, fit = choose(learns=True)
        if estimate.source == "learned" and not fit:
            choice, estimate, fit = choose(learns=False)  # as at a load: a learned figure refuses no model
    needs = dict.fromkeys(choice.devices, estimate.shards[0])
    if choice.shards > 1:
        needs = dict(zip(sharding.assigned(choice, estimate.shards, bounds), estimate.shards, strict=True))
    if not on_host:
        needs[MAIN_MEMORY] = estimate.host
    ways_out = Remedies()
    if not fit:
        room = {**machine.capacities, **bounds}
        is_forked = machine.forks(preset)
        ways_out = remedies(facts, preset, choice, estimate, room, threads=_threads(preset, choice), forked=is_forked)
    readings = [reading for reading in machine.readings if reading.id in needs]
    keys = sharding.limiting_keys(preset, on_host=on_host)
    return Report(
        preset=preset,
        facts=facts,
        files=files,
        is_downloaded=is_downloaded,
        estimate=estimate,
        remedies=ways_out,
        steps=sharding.grantable(choice, estimate, bounds),
        is_forked=machine.forks(preset),
        on_host=on_host,
        ranks=choice.ranks,
        devices=tuple(machine.report(reading, needs[reading.id], bounds, keys) for reading in readings),
        warnings=(*sharding.unused_settings(preset, facts, machine.readings, allowed), *filter(None, [choice.note])),
    )


def unused_placement(loaded: LoadedPresets, environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each key of placement that the devices of this machine do not honour."""
    with contextlib.closing(Devices(environ)) as devices:
        readings = devices.read()
    warnings: list[str] = []
    for preset in loaded.presets.values():
        try:
            allowed = allowed_devices(preset, readings)
            unused = sharding.unused_placement(preset, readings, allowed)
            warnings += (f"{preset.id}: {warning}" for warning in unused)
            sharding.check_count(preset, allowed)
        except (LoadFailed, sharding.Indivisible) as error:  # no fault: presets may be checked on another machine
            warnings.append(error.message)
    return warnings


def check(loaded: LoadedPresets, machine: Machine) -> tuple[dict[str, str], list[str]]:
    """Return a message for each model with files on this machine that does not fit on empty devices, and the warnings
    of all models.

    A preset that changes config.json is estimated by the worker program, which has the classes of configurations, and
    its errors are messages, too. So is a model whose architecture is not in the table of tested ones, and it has a
    message if the engine cannot serve it. Why another model has no estimate, such as devices among which it cannot be
    divided, is a warning.
    """
    found: dict[str, str] = {}
    warnings: list[str] = []
    for preset in loaded.presets.values():
        folder = machine.snapshots.find(preset)
        if folder is None:
            continue
        changes_config = bool(preset.config_override or preset.rope)
        try:
            answer = report(preset, machine, exact=changes_config or _is_untested(preset, machine, folder))
        except RouterError as error:
            if changes_config or (isinstance(error, WorkerProgramError) and error.exit == Exit.UNUSABLE):
                found[preset.id] = str(error)
            else:  # no fault: presets may be checked on another machine
                warnings.append(str(error))
            continue
        warnings += (f"{preset.id}: {warning}" for warning in answer.warnings)
        if not answer.fits:
            lines = [device_line(device, answer.estimate) for device in answer.devices if not device.fits]
            lines += [str(answer.remedies)] * bool(answer.remedies.settings) + [answer.doubt] * bool(answer.doubt)
            found[preset.id] = f"{preset.id}: {'; '.join(' '.join(line.split()) for line in lines)}"
    return found, warnings


def _is_untested(preset: Preset, machine: Machine, folder: str) -> bool:
    """True if the model generates and its architecture is not in the table of tested ones. Raises RouterError."""
    facts = machine.snapshots.facts(Path(folder), preset)
    return facts.model_type not in VERIFIED | VISION and not serves_embeddings(facts, preset)


def _threads(preset: Preset, choice: sharding.Choice) -> int:
    return worker_argv.threads(preset, on_host=choice.on_host, ranks=choice.ranks)


def _files(preset: Preset, machine: Machine, temporary: Path) -> tuple[Path, str]:
    """The folder of the model's files, and their address. Files that are only on the hub have a skeleton in
    `temporary`. A built-in model is made where its first load would make it."""
    settings, environ = machine.settings, machine.environ
    if preset.demo:
        made = run_worker(preset, machine.snapshots.download(preset), Downloaded, environ).snapshot
        return Path(made), made
    folder = machine.snapshots.find(preset)
    if folder is not None:
        return Path(folder), folder
    if settings.offline:
        raise EstimateFailed(
            f"{preset.id}: the files of {preset.repo} at {preset.revision} are not here, and --offline forbids asking"
            " the hub; leave it out, or name a folder"
        )
    from router.cli import hub_headers  # Imported late: it brings an HTTP client, which no other estimate needs.

    hub_headers.skeleton(preset.repo, preset.revision, temporary, environ=environ, token=settings.hf_token)
    return temporary, f"{preset.repo} at {preset.revision}, headers from the hub"
