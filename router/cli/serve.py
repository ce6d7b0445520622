"""One router from start to end: settings, wiring, signals."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp.http
import uvloop
from aiohttp import web

from router import __version__
from router import log as log_lines
from router.api.metrics import Metrics
from router.config import xdg
from router.config.file_watcher import until_written, watching
from router.config.option_types import MemoryByDevice
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.errors import ApiError, ConfigError, PresetInvalid, RouterError
from router.events import EventLog
from router.fleet.fleet import Fleet
from router.http import listen
from router.http.app import App
from router.http.proxy import Proxy
from router.launch.devices import Devices
from router.launch.local import LocalLauncher
from router.launch.page_lock import lockable
from router.memory.learned import LearnedEstimates
from router.planner.ledger import HOST, DeviceId, Ledger
from router.registry.auth import Access
from router.registry.registry import Registry
from router.registry.shared_workers import SharedWorkers
from router.registry.worker_groups import fleet_presets, group_presets
from router.store.catalogue import NONE_ADDED, LoadPresets, ReadKeys
from router.store.snapshots import Snapshots
from worker.protocol.memory import MIB

log = logging.getLogger("router.cli.serve")
# New objects between two collections of the youngest generation. Python's default of 700 suits small programs.
GARBAGE = 10_000

DISK = "disk"  # prefix of the names of threads that read and write files
MOST_READERS = 32  # threads that read files
LAST_ACCESS = 2.0  # seconds that they get after everything else has ended
LAST_MOMENT = 2.0  # seconds to send the last answers after all workers have exited
NO_THREAD = "can't start new thread"  # CPython's message, the only mark of this RuntimeError
# Tasks, by name, without which the router must not go on: without readings every plan is a guess.
ESSENTIAL = frozenset({"devices"})
GIB = 1 << 30
USUAL_LOCKABLE = 8 << 20  # MLOCK_LIMIT, include/uapi/linux/resource.h


def run(settings: Settings, load: LoadPresets, keys: ReadKeys) -> int:
    """Serve until stopped. Return the exit code. `load` reads presets and folders, `keys` reads API keys and key
    files. Raises OSError."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        log_lines.set_up(settings.log_level, settings.log_format)
        if aiohttp.http.HttpRequestParser.__module__ != "aiohttp._http_parser":
            raise RouterError("aiohttp runs without its C parser here; install a wheel of it for this platform")
        _freeze_collector()
        return _ended(uvloop.run(_main(settings, load, keys)))
    except RouterError as error:
        print(f"router: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        remedy = "raise it (ulimit -u, TasksMax= of a systemd unit, --pids-limit of a container)"
        print(f"router: no thread can be started: the limit of processes is reached; {remedy}", file=sys.stderr)
        return 1


def _freeze_collector() -> None:
    """Exempt all present objects from garbage collection. They stay for the whole run. 3 % of them are garbage at this
    point, and a search would take a tenth of the start."""
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)
    gc.enable()


def _ended(code: int) -> int:
    """Return `code` once no thread uses a disk. If a disk does not answer, leave the process at once: its threads
    cannot be joined."""
    until = time.monotonic() + LAST_ACCESS
    for thread in threading.enumerate():
        if thread.name.startswith(DISK):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("a disk does not answer and is not waited for")
                logging.shutdown()
                os._exit(code)
    return code


async def _main(settings: Settings, load: LoadPresets, keys: ReadKeys) -> int:
    stop = _Stop()
    async with AsyncExitStack() as stack:
        stack.enter_context(_signals(stop))
        loaded = load(NONE_ADDED)
        stack.enter_context(_readers())
        writer = ThreadPoolExecutor(1, thread_name_prefix=f"{DISK}-estimates")
        stack.callback(writer.shutdown, wait=False)  # its thread ends once everything is written
        registry = await stack.enter_async_context(_router(settings, load, loaded, keys, stop, writer))
        _banner(settings, registry, loaded)
        _loads = [  # references, which the event loop does not keep
            asyncio.create_task(_load_at_start(registry, preset))
            for preset in loaded.presets.values()
            if preset.load_on_startup and not stop.wanted.is_set()
        ]
        ends = {
            asyncio.create_task(event.wait()) for event in (stop.wanted, stop.failed, registry.fleet.scheduler.broken)
        }
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping: running answers get %.0f s; a second signal cuts them", settings.drain_timeout)
    if stop.failed.is_set() or registry.fleet.scheduler.broken.is_set():
        return 1
    return 130 if stop.hurry.is_set() else 0


@contextmanager
def _readers() -> Iterator[None]:
    """The thread pool for file reads of the event loop. It has so many threads that folders on a disk that does not
    answer leave some free. The end of the loop does not wait for them."""
    readers, loop = ThreadPoolExecutor(MOST_READERS, thread_name_prefix=DISK), asyncio.get_running_loop()
    loop.set_default_executor(readers)
    try:
        yield
    finally:
        readers.shutdown(wait=False, cancel_futures=True)
        loop.set_default_executor(ThreadPoolExecutor(1))


class _Stop:
    """The signals and failures that end or reload a router. The first signal stops in order, the second at once."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.hurry = asyncio.Event()
        self.failed = asyncio.Event()  # an essential task has ended
        self.reload = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(self._on_exception)

    def end(self) -> None:
        (self.hurry if self.wanted.is_set() else self.wanted).set()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that no caller could receive."""
        loop.default_exception_handler(context)
        task = context.get("task")
        if isinstance(task, asyncio.Task) and task.get_name() in ESSENTIAL:
            self.failed.set()


@contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    """Set `stop` at signals for the length of the block. Later ones have no effect, as the process is about to exit.

    The end of the loop or of the interpreter restores the default of other handlers, which is to kill the process.
    """
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: stop.end, signal.SIGINT: stop.end, signal.SIGHUP: stop.reload.set}
    for number, handler in handlers.items():
        signal.signal(number, lambda *_, handler=handler: loop.call_soon_threadsafe(handler))
    try:
        yield
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)


@asynccontextmanager
async def _router(
    settings: Settings,
    load: LoadPresets,
    loaded: LoadedPresets,
    keys: ReadKeys,
    stop: _Stop,
    writer: ThreadPoolExecutor,
) -> AsyncIterator[Registry]:
    """One router, which serves for the length of the block. `writer` writes its estimates."""
    _raise_file_limit()
    state = _state_folder(settings)
    _check_locking(settings.sleep_memory, lockable())
    bound = listen.bind(settings)
    now = time.time_ns() // 1_000_000  # first ids; on average there is less than one event or line per millisecond
    logs, events = log_lines.Ring(first=now), EventLog(first=now)
    logging.getLogger().addHandler(logs)
    log_lines.follow(events)
    devices = Devices(os.environ)
    for note in devices.notes:
        log.info("%s", note)
    async with _launcher(settings, devices, listen.name(bound[0])) as launcher:
        files = Snapshots(cache=settings.hub_cache, state=state, offline=settings.offline, prepare=settings.prepare)
        fleet = Fleet(
            launcher=launcher,
            learned_estimates=LearnedEstimates(state / "estimates.json", driver=devices.driver, submit=writer.submit),
            events=events,
            files=files,
            ledger=_ledger(settings, devices, {reading.id for reading in launcher.readings()}),
            presets=fleet_presets(loaded.presets, group_presets(loaded.presets)),
            settings=settings,
        )
        launcher.on_reading = fleet.scheduler.plan_soon
        fleet.scheduler.plan_now()
        registry = Registry(
            settings=settings,
            fleet=fleet,
            launcher=launcher,
            files=files,
            events=events,
            access=Access(keys(), settings),
            load=load,
            keys=keys,
            shared_workers=SharedWorkers(fleet, loaded.presets),
            port=listen.port(bound[0]),
            logs=logs,
            startup_pending=frozenset(preset.id for preset in loaded.presets.values() if preset.load_on_startup),
        )
        events.subscribe(registry.on_event, unrecorded=False)
        metrics = Metrics(fleet, events)
        async with (
            _listening(App(registry, Proxy(registry.shared_workers), metrics), bound),
            _closing(registry, launcher, stop),
            _background_tasks(registry, metrics, stop),
            _watch(settings, stop),
        ):
            yield registry


def _launcher(settings: Settings, devices: Devices, name: str) -> LocalLauncher:
    """The launcher of a router. `name`: that of its runtime folder. Raises ConfigError."""
    runtime = xdg.runtime(settings.runtime_dir, os.environ, name)
    return LocalLauncher(
        devices=devices,
        runtime_dir=runtime,
        environ=os.environ,
        shared_folder=runtime.absolute().parent / "fleet-router-reservations",
        offline=settings.offline,
        hf_token=settings.hf_token,
        fork_server=settings.fork_server,
    )


def _ledger(settings: Settings, devices: Devices, here: Set[DeviceId]) -> Ledger:
    """Raises ConfigError if a setting names a device that does not exist."""
    margins = devices.by_device(settings.models_memory_margin, "--models-memory-margin")
    limits = devices.by_device(settings.device_limit, "--device-limit")
    for name, limit in settings.device_limit.items():
        stated, device = MemoryByDevice().write({name: limit}), devices.device_id(name)
        if device not in here:
            raise ConfigError(f"--device-limit {stated}: there is no such device here")
        margin = margins.get(device, settings.margin(""))
        if limits[device] <= margin:
            raise ConfigError(
                f"--device-limit: {stated} leaves nothing beside the margin of {margin // MIB} MiB; raise it or"
                " lower --models-memory-margin"
            )
    return Ledger(
        margin=lambda id: margins.get(id, settings.models_memory_margin.get("", 0)),
        limit=limits.get,
        models_max=settings.workers_at_once,
    )


@asynccontextmanager
async def _listening(app: App, bound: list[socket.socket]) -> AsyncIterator[None]:
    """Accept clients for the length of the block, and send the last answers at its end."""
    runner = web.AppRunner(app.build(), handler_cancellation=True, shutdown_timeout=LAST_MOMENT)
    await runner.setup()
    paths = [sock.getsockname() for sock in bound if sock.family == socket.AF_UNIX]
    listener = app.listener(runner)
    for sock in bound:
        listener.listen(sock)
    try:
        yield
    finally:
        app.end_streams()
        await listener.close(LAST_MOMENT)
        await runner.cleanup()
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


@asynccontextmanager
async def _closing(registry: Registry, launcher: LocalLauncher, stop: _Stop) -> AsyncIterator[None]:
    """All workers are reaped when the block ends. The second signal cuts their requests and kills them."""
    try:
        yield
    finally:
        fleet = registry.fleet
        registry.closing = True
        registry.events.append("shutdown", "*")
        closing = asyncio.create_task(fleet.close())
        hurry = asyncio.create_task(stop.hurry.wait())
        await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not closing.done():
            log.warning("stopping at once")
            forced = asyncio.create_task(fleet.close(force=True))
            await asyncio.sleep(0)  # Its first step rejects the waiting requests with the reason.
            launcher.kill_all()
            await forced
        await closing


@asynccontextmanager
async def _background_tasks(registry: Registry, metrics: Metrics, stop: _Stop) -> AsyncIterator[None]:
    """Run reloads, the event-loop check and the first sweep of converted snapshots while requests are
    answered."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = {
        loop.create_task(reload_when_set(stop.reload, partial(_reload, registry)), name="reload"),
        loop.create_task(metrics.watch_the_loop(), name="lag"),
    }
    if registry.settings.prepare:
        tasks.add(loop.create_task(asyncio.to_thread(registry.files.conversions.sweep), name="sweep"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _load_at_start(registry: Registry, preset: Preset) -> None:
    """A failure is logged and does not end the router."""
    try:
        await registry.shared_workers.load(preset.id)
    except ApiError as error:
        if not registry.closing:
            log.error("%s was to be loaded on startup: %s", preset.id, error.message)


@asynccontextmanager
async def _watch(settings: Settings, stop: _Stop) -> AsyncIterator[None]:
    """With --models-watch: reload after each change of the file or folder of models."""
    named = [Path(name) for name in (settings.models_preset, settings.models_dir) if name]
    if not settings.models_watch or not named:
        if settings.models_watch:
            log.warning("--models-watch: no --models-preset and no --models-dir is given, so there is nothing to watch")
        yield
        return
    async with watching(named, stop.reload.set):
        yield


async def _reload(registry: Registry) -> Mapping[str, Any]:
    """Reload once the preset file is written. Raises like `Registry.reload`."""
    if registry.settings.models_preset:
        await until_written(Path(registry.settings.models_preset))
    return await registry.reload()


async def reload_when_set(wanted: asyncio.Event, reload: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Runs forever. Several triggers during one reload cause one further reload, which starts after all of them.
    Warnings of a reload are logged, since no caller receives them."""
    while True:
        await wanted.wait()
        wanted.clear()
        try:
            for warning in (await reload())["warnings"]:
                log.warning("%s", warning)
        except PresetInvalid:
            pass  # its event `config_refused` is logged
        except Exception:
            log.exception("not reloaded: the router failed")


def _state_folder(settings: Settings) -> Path:
    """Create the folder if it does not exist. It need not be writable, since its content is optional. Raises OSError,
    and ConfigError if no folder is known."""
    state = xdg.state(settings.state_dir)
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot use the state folder {state}: {why}; give another --state-dir") from None
    return state


def _raise_file_limit() -> None:
    """Raise the descriptor limit to the hard limit: a client connection and its worker connection take two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_locking(wanted: int, allowed: int | None) -> None:
    """Warn if models of up to `wanted` bytes could sleep, but a process may lock only `allowed` bytes. Raises
    ConfigError if that limit is not more than the kernel's default, which no model fits.

    Each sleeping model has a process, so the limit is that of one model.
    """
    if allowed is None or wanted <= allowed:
        return
    limit = f"this user may lock only {allowed / MIB:g} MiB of main memory"
    remedy = "raise that (ulimit -l, LimitMEMLOCK= of a systemd unit, --ulimit memlock= of a container)"
    if allowed <= USUAL_LOCKABLE:
        raise ConfigError(f"--sleep-memory {wanted // MIB}: {limit}; {remedy}, or lower it")
    log.warning("--sleep-memory: %s for each model, so models with more weights do not sleep; %s", limit, remedy)


def _banner(settings: Settings, registry: Registry, loaded: LoadedPresets) -> None:
    """The first lines for a person who starts the router."""
    host = settings.host.split(",")[0].strip()
    shown = f"[{host}]" if ":" in host else host
    page = f"http://{shown}:{registry.port}{settings.api_prefix}/"
    at = f"API {host}" if host.endswith(".sock") else f"API {page}v1   page {page}"
    lines = [f"router {__version__}   {at}"]
    for device in registry.fleet.scheduler.devices:
        if device.id.index < HOST:
            continue
        limit = f"   limit {device.limit / GIB:.1f}" if device.limit is not None else ""
        others = f"used by others {device.foreign / GIB:.1f}"
        margin = f"margin {device.margin / GIB:.1f}"
        most = device.total if device.limit is None else min(device.total, device.limit)
        useless = "   nothing is left for models: lower --models-memory-margin" if most <= device.margin else ""
        lines.append(
            f"device   {device.id!s:8} total {device.total / GIB:.1f} GiB   {others}   {margin}{limit}{useless}"
        )
    names = " ".join(
        id + (" (pinned)" if preset.pin else " (on startup)" if preset.load_on_startup else "")
        for id, preset in loaded.presets.items()
    )
    lines.append(f"models   {len(loaded.presets)}: {names or 'none'}")
    if not settings.names_models and not settings.serves_demo:
        lines.append(f"         {_unnamed(settings, is_empty=not loaded.presets)}")
    _say("\n".join(lines))


def _unnamed(settings: Settings, *, is_empty: bool) -> str:
    """The line for a person who named no model."""
    ways = "router org/name, router -m DIR, router --models-preset FILE or router --demo"
    if not settings.lists_cache:
        return f"no model is named, and --no-models-cache leaves nothing to serve; try {ways}"
    if is_empty:
        return f"no model is named, and the hub cache {settings.hub_cache} has none; try {ways}"
    return f"no model is named, so these are the models of the hub cache {settings.hub_cache}; or try {ways}"


def _say(text: str) -> None:
    """Write to stderr if that is possible: a full disk of logs must not prevent serving."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
