"""The worker program: `python -m worker VERB --options`. Events go to stdout, the log to stderr, the cause of the exit
into the exit code.

Every verb imports its large libraries itself, after it has attached to its router: `download` and `--help` never import
torch, and a worker whose router dies during the import of torch exits at once.
"""

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from worker.program import supervision
from worker.protocol.memory import KERNEL_CODES

if TYPE_CHECKING:
    from worker.engines.transformers.device.rank_processes import LeaderLink, RankProcesses
    from worker.program.supervision import RouterChannel
    from worker.protocol.argv import Convert, Download, Estimate, Serve

CRASHED = 1  # exit code of an unexpected error; the router treats every unknown code as a crash
ESTIMATE_CPU_SECONDS = 10.0  # beyond the imports; most models take less than three
_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
# Compiled matrix kernels that oneDNN and torch's layer above it cache, one per shape
# (`engines.transformers.attention.cpu_linear`). Each takes about 0.65 MB: with the default of 1024 a worker could grow
# by more than half a gigabyte beyond its estimate. Compiling a dropped kernel again takes about 0.4 ms (measured on
# torch 2.13 with AVX-512).
_KERNEL_CACHES = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(KERNEL_CODES))
_FORK_SERVER = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # libraries that count devices on import must not initialize the driver
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # no threads
}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the driver's order, which the router uses
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and end the process with its exit code (`Exit`).

    The fork server calls it again in each process that it forks.
    """
    code = run(sys.argv[1:] if argv is None else list(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: it would wait for threads that wait for the network, and free piece by piece the
    # memory that the kernel frees at once.
    os._exit(code)


def run(argv: list[str]) -> int:
    """Run the verb of `argv` (verb first) and return the exit code. Attaches to the router: once per process."""
    if {"-h", "--help"} & set(argv):
        from worker.protocol.argv import help_text  # late, like all imports below: see the module's docstring

        print(help_text(argv[0]), end="")
        return 0
    if not argv:
        print("worker: no verb; one of download, convert, estimate, serve; see worker --help", file=sys.stderr)
        return 2
    supervised, parent_pid = "--supervised" in argv, _number(argv, "--parent-pid")
    if supervised and not parent_pid:
        print("worker: --supervised needs --parent-pid=PID, the process id of the parent", file=sys.stderr)
        return 2
    if argv[0] == "fork-server":
        return _run_fork_server(argv)
    # Ranks are forked before anything else, while the process has one thread. A failure is reported below, once there
    # is a channel for it.
    ranks, fork_error = None, None
    try:
        ranks = _fork_ranks(argv)
    except OSError as error:
        fork_error = error
    channel = supervision.attach(supervised=supervised, parent_pid=parent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # until the server handles them, no work needs a clean end
    try:
        if fork_error is not None:
            raise fork_error
        _run_verb(argv, channel, ranks)
    except BaseException as error:  # noqa: BLE001 - the end of the program: every error becomes a message and a code
        return _report(error, channel)
    return 0


def _number(argv: list[str], option: str) -> int:
    """The number after `option`; 0 if it is missing. A full parse must wait until the process is attached."""
    for position, word in enumerate(argv):
        name, _, value = word.partition("=")
        value = value or "".join(argv[position + 1 : position + 2])
        if name == option and value.isdecimal():
            return int(value)
    return 0


def _log() -> None:
    """Configure logging, in the fork server for all children: changing a level later visits every logger."""
    import logging

    if logging.getLogger().handlers:
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # below that they log one line per request


def _set_environment(threads: int) -> None:
    """Set the variables that torch and other libraries read once, when they are imported."""
    os.environ.update(_OFFLINE)
    for name, value in _KERNEL_CACHES.items():
        os.environ.setdefault(name, value)
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)


# Tensor-parallel ranks


def _fork_ranks(argv: list[str]) -> "RankProcesses | None":
    """Fork the ranks of a tensor-parallel model; None for any other."""
    count = _number(argv, "--tensor-parallel") if argv[0] == "serve" else 0
    if count < 2:
        return None
    from worker.engines.transformers.device.rank_processes import RankProcesses

    return RankProcesses.fork(count, partial(_follow, argv), supervision.attach_rank)


def _follow(argv: list[str], link: "LeaderLink") -> int:
    """Run a rank other than the first and return its exit code. The leader gets the cause of a failure by `link`."""
    import traceback

    from worker.protocol.argv import Serve, from_argv

    try:
        command = from_argv(argv)
        assert isinstance(command, Serve), "only `serve` has ranks"
        _log()
        os.environ.update(_QUIET)
        os.environ.pop("HF_TOKEN", None)
        _set_environment(command.threads)
        with supervision.importing():
            from worker.engines.transformers.run import tensor_parallel

        tensor_parallel.follow(command, link)
    except BaseException as error:  # noqa: BLE001 - the end of the program: every error becomes a message and a code
        code, message = diagnose(error)
        if code == CRASHED:
            traceback.print_exception(error)
        link.fail(code, message)
        return code
    return 0


# Fork server


def _run_fork_server(argv: list[str]) -> int:
    from worker.program import fork_server
    from worker.protocol.argv import ForkServerOptions, from_argv
    from worker.protocol.events import Exit

    try:
        command = from_argv(argv)
    except ValueError as error:
        print(f"worker: {error}; see worker --help", file=sys.stderr)
        return Exit.USAGE
    assert isinstance(command, ForkServerOptions)
    os.environ.update(_QUIET | _FORK_SERVER)
    _log()
    _set_environment(1)  # for the imports; each child sets its own number of threads
    return fork_server.serve(command, _run_forked)


def _run_forked(argv: list[str]) -> NoReturn:
    """The main function of a forked child: as an executed worker, with the imports done."""
    from worker.engines.transformers.device import memory

    memory.inheritance.take()
    main(argv)


# The other verbs


def _run_verb(argv: list[str], channel: "RouterChannel", ranks: "RankProcesses | None") -> None:
    began = time.monotonic()
    from worker.errors import StartError
    from worker.protocol.argv import Convert, Download, Estimate, Serve, from_argv
    from worker.protocol.events import Exit

    _log()
    try:
        command = from_argv(argv)
    except ValueError as error:
        raise StartError(f"{error}; see worker --help", Exit.USAGE) from None
    os.environ.update(_QUIET)
    hub_token = os.environ.pop("HF_TOKEN", None)  # the environment of a process is readable for other processes
    match command:
        case Download():
            _download(command, channel, hub_token)
        case Convert():
            _convert(command, channel)
        case Estimate():
            _estimate(command, channel)
        case Serve():
            _serve(command, channel, began, ranks)


def _download(command: "Download", channel: "RouterChannel", hub_token: str | None) -> None:
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "60")  # seconds without a byte
    from worker.fetch import download

    download.download(command, channel.send, token=hub_token)


def _convert(command: "Convert", channel: "RouterChannel") -> None:
    _set_environment(command.threads)
    with supervision.importing():
        from worker.fetch import convert

    channel.send(convert.convert(command, channel.send))


def _estimate(command: "Estimate", channel: "RouterChannel") -> None:
    _set_environment(command.threads)
    # A worker that serves has the server imported. Import it before the estimate measures the process.
    # The limit is on what depends on the model. Imports took 10 CPU-seconds on a machine with many packages (H100).
    with supervision.importing():
        import_module("worker.server.server")
        import_module("worker.engines.transformers.engine")
        from worker.estimate import estimate
    limit_cpu(ESTIMATE_CPU_SECONDS)
    channel.send(estimate.estimate(command))


def limit_cpu(seconds: float) -> None:
    """Raise TimeoutError in the main thread after so many more seconds of CPU time. The kernel kills the process if it
    has not ended some seconds later.

    A request may wait for an estimate, so its cost must have a bound. CPU time is counted, because on a busy machine
    the wall clock depends more on other programs than on the model.
    """
    import resource

    def stop(*_: object) -> None:
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)  # the kernel repeats it each second
        raise TimeoutError(f"it took more than {seconds:g} s of CPU time")

    signal.signal(signal.SIGXCPU, stop)
    limit = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))


def _serve(command: "Serve", channel: "RouterChannel", began: float, ranks: "RankProcesses | None") -> None:
    """`began`: start of the load, monotonic clock."""
    _set_environment(command.threads)
    from worker.errors import StartError
    from worker.program.serve import serve
    from worker.protocol.events import Exit

    if channel.supervised and not channel.token:
        raise StartError("the first line of stdin must be this worker's token", Exit.USAGE)
    try:
        run_last(serve(command, channel, began, ranks))
    finally:
        if ranks is not None:
            ranks.end()


def run_last(work: Coroutine[object, object, None]) -> None:
    """Run `work`, after which the process ends. Signals that `work` handles in its event loop stay handled.

    The loop is not closed, as `asyncio.run` does it. A signal during the close is logged with a traceback, because the
    pipe of the loop is closed before the handlers are removed; a later one kills the process before its exit code.
    """
    import asyncio

    asyncio.Runner().run(work)  # the event loop policy keeps the loop from being freed, which would close it


# Errors


def _report(error: BaseException, channel: "RouterChannel") -> int:
    """Write the cause of the exit to stderr and to the router. Returns the exit code."""
    import traceback

    from worker.errors import RankLost
    from worker.protocol.events import Failed

    code, message = diagnose(error)
    if code == CRASHED and not isinstance(error, RankLost):
        traceback.print_exception(error)
    print(f"worker: {message}", file=sys.stderr)
    if channel.supervised:
        channel.send(Failed(message=message))
    return code


def diagnose(error: BaseException) -> tuple[int, str]:
    """Return the exit code and a one-line message for `error`; CRASHED for unknown errors."""
    from worker.engines.transformers.device import cuda_errors
    from worker.errors import RankLost, StartError
    from worker.protocol.events import Exit

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, StartError):
        return error.exit, text
    if isinstance(error, RankLost):
        return diagnose(error.__cause__)[0] if error.__cause__ is not None else CRASHED, text
    if cuda_errors.is_device_full(error):
        return Exit.DEVICE_MEMORY, f"out of device memory: {text}"
    if cuda_errors.is_exhausted(error) or getattr(error, "errno", 0) == errno.ENOMEM:
        return Exit.HOST_MEMORY, f"out of host memory: {text}"
    if cuda_errors.is_sticky(error):
        return Exit.POISONED, f"the device can no longer be used by this process: {text}"
    if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        return Exit.DISK_FULL, f"the disk is full: {text}"
    if error.__cause__ is not None and diagnose(error.__cause__)[0] != CRASHED:
        return diagnose(error.__cause__)
    return CRASHED, f"{type(error).__name__}: {text}"
