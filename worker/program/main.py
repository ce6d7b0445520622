"""Verbs: download, convert, estimate, serve, nursery. A worker as a program: options in, events and an exit code out.

Everything heavy is imported by the verb that needs it, after the leash is taken: `download` and `--help` never see
torch, and a worker whose router dies while torch is being imported is gone at once.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from worker.program import supervision

if TYPE_CHECKING:
    from worker.engines.transformers.device.rank_processes import LeaderLink, RankProcesses
    from worker.protocol.argv import Serve

CRASHED = 1
"""Exit code of what nobody expected; to the router a crash, as any code that it does not know."""
_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Matrix kernels that oneDNN and torch's layer above it keep, one for each shape (`engine.linears`). Each takes about
0.65 MB whatever its size: with the default of 1024 a worker could grow by more than half a gigabyte that no estimate
knows. One that was dropped is made again in about 0.4 ms (measured on torch 2.13 with AVX-512)."""
_NURSERY = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks for devices while it is imported must not start the driver
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # no threads
}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the driver's own order, by which the router counts
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and end the process with its exit code (`Exit`).

    A nursery runs it again in each process that it forks.
    """
    code = run(sys.argv[1:] if argv is None else list(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the interpreter's own farewell: it would wait for threads that wait for the network, and would give back
    # piece by piece the memory that the kernel takes back at once.
    os._exit(code)


def run(words: list[str]) -> int:
    """Do what `words` (verb first) ask for; returns the exit code. Takes the leash, so once in a process."""
    if {"-h", "--help"} & set(words):
        from worker.program import help  # late, like all imports below: see the module's docstring

        print(help.of(words[0]))
        return 0
    if not words:
        print("worker: say what to do: download, convert, estimate or serve; see worker --help", file=sys.stderr)
        return 2
    leashed, spawner = "--leashed" in words, _number(words, "--spawner")
    if leashed and not spawner:
        print("worker: --leashed needs --spawner=PID, the process id of whoever starts this one", file=sys.stderr)
        return 2
    if words[0] == "nursery":
        return _nurse(words)
    ranks, unforked = None, None
    try:
        ranks = _fork_ranks(words)
    except OSError as error:
        unforked = error
    tied = supervision.take(leashed=leashed, spawner=spawner)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # asked to stop; nothing is half-done that needs an end
    try:
        if unforked is not None:
            raise unforked
        _dispatch(words, tied, ranks)
    except BaseException as error:  # noqa: BLE001 - the end of the program: whatever it is becomes words and a code
        return _report(error, tied)
    return 0


def _number(words: list[str], option: str) -> int:
    """The number after `option`; 0: none. Looked up by hand, since parsing has to wait until the leash is taken."""
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        value = value or "".join(words[number + 1 : number + 2])
        if name == option and value.isdecimal():
            return int(value)
    return 0


def _fork_ranks(words: list[str]) -> "RankProcesses | None":
    """The processes that follow this one, of a model that is divided: now, as there is only one thread here yet."""
    count = _number(words, "--tensor-parallel") if words[0] == "serve" else 0
    if count < 2:
        return None
    from worker.engines.transformers.device.rank_processes import RankProcesses

    return RankProcesses.fork(count, partial(_follow, words), supervision.follow)


def _follow(words: list[str], link: "LeaderLink") -> int:
    """What a follower does, from its birth on; returns its exit code, which the leader has been told with the cause."""
    import traceback

    from worker.protocol.argv import Serve, from_argv

    try:
        command = from_argv(words)
        assert isinstance(command, Serve), "only those have ranks"
        _log()
        os.environ.update(_QUIET)
        os.environ.pop("HF_TOKEN", None)
        _prepare(command.threads)
        from worker.engines.transformers.run import tensor_parallel

        tensor_parallel.follow(command, link)
    except BaseException as error:  # noqa: BLE001 - whatever it is becomes words and a code
        code, message = diagnose(error)
        if code == CRASHED:
            traceback.print_exception(error)
        link.fail(code, message)
        return code
    return 0


def _log() -> None:
    """In a nursery for all of its children: to change a level has the library look at every logger that there is."""
    import logging

    if logging.getLogger().handlers:
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # one line for each request


def _nurse(words: list[str]) -> int:
    from worker.program import fork_server
    from worker.protocol.argv import Nursery, from_argv
    from worker.protocol.exits import Exit

    try:
        command = from_argv(words)
    except ValueError as error:
        print(f"worker: {error}; see worker --help", file=sys.stderr)
        return Exit.USAGE
    assert isinstance(command, Nursery)
    os.environ.update(_QUIET | _NURSERY)
    _log()
    _prepare(1)  # what libraries look up when they are loaded must be so here; each child settles it once more
    return fork_server.serve(command, _begin_forked)


def _begin_forked(words: list[str]) -> NoReturn:
    """What a child of the nursery does: all that an executed worker does, with its imports done."""
    from worker.engines.transformers.device import memory

    memory.inheritance.take()
    main(words)


def _dispatch(words: list[str], tied: supervision.Leash, ranks: "RankProcesses | None") -> None:
    began = time.monotonic()
    from worker.errors import StartError
    from worker.protocol.argv import Convert, Download, Estimate, Nursery, from_argv
    from worker.protocol.exits import Exit

    _log()
    try:
        command = from_argv(words)
    except ValueError as error:
        raise StartError(f"{error}; see worker --help", Exit.USAGE) from None
    os.environ.update(_QUIET)
    hub_token = os.environ.pop("HF_TOKEN", None)
    if isinstance(command, Download):
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "60")  # seconds without a byte
        from worker.fetch import download

        download.download(command, tied.say, token=hub_token)
        return
    assert not isinstance(command, Nursery), "it never takes this leash"
    _prepare(command.threads)
    if isinstance(command, Estimate):
        # A worker that serves has the server imported. Import it before the estimate measures the process.
        import_module("worker.server.server")
    if isinstance(command, Estimate) and command.tensor_parallel > 1:
        from worker.estimate import tensor_parallel

        tied.say(tensor_parallel.divided_estimate(command))
    elif isinstance(command, Estimate):
        from worker.estimate import estimate

        tied.say(estimate.estimate(command))
    elif isinstance(command, Convert):
        from worker.fetch import convert

        tied.say(convert.convert(command, tied.say))
    else:
        _serve(command, tied, began, ranks)


def _prepare(threads: int) -> None:
    """Settle, before torch is imported, what it and its libraries look up only then."""
    os.environ.update(_OFFLINE)
    for name, value in _KERNEL_CACHES.items():
        os.environ.setdefault(name, value)
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)


def _serve(command: "Serve", tied: supervision.Leash, began: float, ranks: "RankProcesses | None") -> None:
    """Returns once the worker has been asked to stop and its running answers have ended. `began`: when its work did."""
    import asyncio

    from worker.errors import StartError
    from worker.protocol.exits import Exit

    if tied.leashed and not tied.token:
        raise StartError("the first line of stdin must be this worker's token", Exit.USAGE)
    try:
        asyncio.run(_serve_until_told(command, tied, began, ranks))
    finally:
        if ranks is not None:
            ranks.end()


class Laps:
    """Where the time of a load goes: seconds by stage, one behind another."""

    def __init__(self, began: float):
        """`began`: when the first one did, by the monotonic clock."""
        self.seconds: dict[str, float] = {}
        self._at = began

    def stage_done(self, stage: str) -> None:
        """What passed since the last stage was this one; a stage may come in parts."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._at
        self._at = now


async def _serve_until_told(
    command: "Serve", tied: supervision.Leash, began: float, ranks: "RankProcesses | None"
) -> None:
    import asyncio
    import logging

    from worker.engines.transformers.load.page_cache import BackgroundReader
    from worker.protocol.events import Prepared, Pulse, Ready
    from worker.protocol.exits import Exit

    reading = BackgroundReader.of(command.snapshot)
    may_read = not command.prepare and command.load_format != "dummy"  # before there is room the router says when
    if may_read and "torch" not in sys.modules:
        reading.start()
        may_read = False
    from worker.engines.transformers.device import memory
    from worker.engines.transformers.device.process_overhead import overhead
    from worker.engines.transformers.engine import TransformersEngine
    from worker.engines.transformers.preparation import prebuilt_models
    from worker.errors import StartError
    from worker.server.server import Server, asked_to_stop

    laps = Laps(began)
    laps.stage_done("imports")
    if may_read and prebuilt_models.find(command) is None:
        reading.start()

    if command.prepare and not tied.leashed:
        raise StartError("--prepare waits for a router's word on stdin, so it needs --leashed", Exit.USAGE)
    prepared = TransformersEngine.prepare(command, stage_done=laps.stage_done)
    if command.prepare:
        tied.say(Prepared(measured=memory.measured(("cpu",))))
        command = _go(command, tied)
        laps.stage_done("standby")
    reading.stop()
    # By hand a line each second would only hide the others.
    pulse: Callable[[Pulse], None] = tied.say if tied.leashed else lambda _: None
    engine = TransformersEngine.load(
        command, prepared, progress=tied.say, pulse=pulse, stage_done=laps.stage_done, ranks=ranks
    )
    server = Server(engine, engine.tokenizer, command, token=tied.token or None, announce=tied.say)
    address = await server.start()
    laps.stage_done("server")
    told = asked_to_stop()
    fatal = asyncio.wrap_future(engine.fatal)
    fatal.add_done_callback(lambda _: told.set())
    if not tied.leashed:
        where = address.replace("tcp:", "http://")
        logging.getLogger("worker").info("%s answers at %s; Ctrl-C stops it", command.name or command.snapshot, where)
    tied.say(
        Ready(
            address=address,
            measured=engine.measured,
            later=engine.later,
            capabilities=server.capabilities,
            n_ctx=engine.ctx_size,
            seconds=laps.seconds,
            processor=time.process_time(),
            overhead=overhead.said,
            overhead_is_own=overhead.is_own,
            modules=_family_modules(),
        )
    )
    engine.map_rest()
    await told.wait()
    if server.is_idle and not fatal.done():  # somebody waits for our memory, and nobody for an answer
        server.leave()
        return
    await server.close()
    await engine.close()
    if fatal.done():
        raise fatal.result()


def _family_modules() -> list[str]:
    """Code of the model's family that this process was not forked with, so that its nursery may have it, too."""
    from worker.engines.transformers.device import memory
    from worker.protocol.orders import is_warmable

    # from the end: a look at a name that came from the nursery copies the page that it is on, 5 ms for all of them
    own = islice(reversed(sys.modules), len(sys.modules) - memory.inheritance.modules)
    return [name for name in tuple(own) if name.startswith("transformers.") and is_warmable(name)]


def _go(command: "Serve", tied: supervision.Leash) -> "Serve":
    """Returns once there is room: the command with what was not known before. Nothing has looked at devices yet."""
    import dataclasses

    from worker.errors import StartError
    from worker.protocol.exits import Exit
    from worker.protocol.orders import decode_go

    line = tied.told()
    try:
        go = decode_go(line)
        os.environ["CUDA_VISIBLE_DEVICES"] = go.visible
        return dataclasses.replace(command, devices=tuple(go.devices), reserved=go.reserved)
    except (ValueError, TypeError) as error:
        raise StartError(f"what came on stdin is no word to go: {error}", Exit.USAGE) from None


def _report(error: BaseException, tied: supervision.Leash) -> int:
    """Say for people and for the router why this process ends; returns its exit code."""
    import traceback

    from worker.errors import RankLost
    from worker.protocol.events import Failed

    code, message = diagnose(error)
    if code == CRASHED and not isinstance(error, RankLost):
        traceback.print_exception(error)
    print(f"worker: {message}", file=sys.stderr)
    if tied.leashed:
        tied.say(Failed(message=message))
    return code


def diagnose(error: BaseException) -> tuple[int, str]:
    """Exit code and one line for a person; CRASHED for whatever is not known to mean something."""
    from worker.engines.transformers.device import cuda_errors
    from worker.errors import RankLost, StartError
    from worker.protocol.exits import Exit

    text = " ".join(str(error).split()) or type(error).__name__
    # By name, since torch may never have been imported.
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if isinstance(error, StartError):
        return error.exit, text
    if isinstance(error, RankLost):
        return diagnose(error.__cause__)[0] if error.__cause__ is not None else CRASHED, text
    if cuda_errors.is_device_full(error):
        return Exit.DEVICE_MEMORY, f"out of device memory: {text}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or getattr(error, "errno", 0) == errno.ENOMEM:
        return Exit.HOST_MEMORY, f"out of host memory: {text}"
    if "torch.AcceleratorError" in kinds or "CUDA error" in text:
        return Exit.POISONED, f"the device can no longer be used by this process: {text}"
    if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        return Exit.DISK_FULL, f"the disk is full: {text}"
    if error.__cause__ is not None and diagnose(error.__cause__)[0] != CRASHED:
        return diagnose(error.__cause__)
    return CRASHED, f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
