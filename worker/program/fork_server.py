"""The fork server: a process that has the imports done and forks workers on its router's orders.

A forked worker runs the same `main` as an executed one: in a session of its own, with the descriptors and the
environment of its `ForkSpec`, and with none of the fork server's. For models that it has forked workers for, the fork
server keeps prebuilt everything that needs no weights (`worker.engines.transformers.preparation`). Each prebuild is
tried in a child first, because it may crash, hang or start a thread.

Rules:

* One thread and no initialized device driver, because fork copies only the calling thread and no driver survives it.
  `unsafe_to_fork` checks this before every fork. If it fails, the fork is refused and the router executes the worker.
* A child that has exited stays a zombie until the router orders it to be reaped, so that its pid is not reused while
  the router still refers to it.
* Workers die with the fork server. It has no state to hand over, and does little that could fail.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from worker.program import supervision
from worker.protocol.argv import ForkServerOptions, Serve, from_argv
from worker.protocol.events import Exit, Forked, ForkRefused, ModulesImported, Reaped
from worker.protocol.orders import (
    MAX_ORDER_BYTES,
    Fork,
    ForkSpec,
    ImportModules,
    Order,
    Reap,
    decode_order,
    is_family_module,
)

if TYPE_CHECKING:
    from worker.engines.transformers.preparation import PrebuiltModels

# Modules of every worker that computes, for any model.
ALWAYS = (
    "torch", "transformers", "aiohttp.web", "tokenizers", "jinja2", "worker.engines.transformers.engine",
    "worker.server.server", "worker.program.serve", "worker.estimate.estimate", "transformers.modeling_utils",
    "transformers.generation.utils", "transformers.models.auto", "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers", "transformers.modeling_layers", "transformers.conversion_mapping",
    "transformers.utils.chat_template_utils", "transformers.processing_utils", "transformers.video_utils",
    "encodings.unicode_escape",
)  # fmt: skip
# Files that an initialized driver keeps open: NVIDIA, the same on Jetson and in WSL, AMD.
DEVICE_FILES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/nvgpu", "/dev/dxg", "/dev/kfd", "/dev/dri/")
CUDA_DRIVER, NOT_INITIALIZED = "libcuda.so.1", 3  # CUDA_ERROR_NOT_INITIALIZED
# Seconds from the fork of a worker to the prebuild of its model, so that the two do not compete for the CPU. A guess.
PREBUILD_DELAY = 1.0
TRIAL_TIMEOUT = 60.0
TIDY_INTERVAL = 30.0

RunWorker = Callable[[list[str]], NoReturn]


def serve(command: ForkServerOptions, run: RunWorker, *, modules: Sequence[str] = ALWAYS) -> int:
    """Import `modules`, then carry out orders until the router has exited. Returns the exit code.

    `run` is the main function of a child; it ends the process. The calling process must have one thread, and its stdin
    must stay open as long as the router lives.
    """
    if not command.supervised:
        print("worker: the fork server is started by a router only, with --supervised and --orders", file=sys.stderr)
        return Exit.USAGE
    supervision.die_with_parent(command.parent_pid)
    events = os.dup(1)
    os.dup2(2, 1)
    orders = socket.socket(fileno=command.orders)
    loop = ForkServerLoop(orders, supervision.RouterChannel(events, supervised=True), run)
    with supervision.importing():
        loop.import_all(modules)
    return loop.serve()


class ForkServerLoop:
    """One thread that waits for orders, for end of file on stdin, and for the next prebuild."""

    def __init__(self, orders: socket.socket, channel: supervision.RouterChannel, run: RunWorker):
        self._orders = orders
        self._channel = channel
        self._run = run
        self._prebuilt: PrebuiltModels | None = None
        # Models to prebuild, by snapshot, the earliest first: from when on (monotonic clock), and the options.
        self._to_prebuild: dict[str, tuple[float, Serve]] = {}
        self._trial: PrebuildTrial | None = None

    def serve(self) -> int:
        """Obey orders until the router closes stdin or the socket of orders. Returns the exit code."""
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(self._orders, select.POLLIN)
            if self._trial is not None:
                poll.register(self._trial.result, select.POLLIN)
            ready = dict(poll.poll(self._poll_timeout()))
            if 0 in ready and not os.read(0, 4096):
                return supervision.ORPHANED
            if self._orders.fileno() not in ready:
                self._prebuild()
                continue
            packet, descriptors, _, _ = socket.recv_fds(self._orders, MAX_ORDER_BYTES, 4)
            if not packet:
                return supervision.ORPHANED
            try:
                self._obey(decode_order(packet), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _obey(self, order: Order, descriptors: Sequence[int]) -> None:
        match order:
            case Fork():
                self._fork(order.id, descriptors)
            case Reap():
                code = os.waitstatus_to_exitcode(os.waitpid(order.pid, 0)[1])
                self._channel.send(Reaped(pid=order.pid, code=code))
            case ImportModules():
                self.import_all(name for name in order.modules if is_family_module(name))

    # Prebuilt models

    def _poll_timeout(self) -> float | None:
        """Milliseconds until there is work without an order; None: there is none."""
        now = time.monotonic()
        if self._trial is not None:
            due = self._trial.deadline
        elif self._to_prebuild:
            due = next(iter(self._to_prebuild.values()))[0]
        elif self._prebuilt:
            due = now + TIDY_INTERVAL
        else:
            return None
        return 1000 * max(0.0, due - now)

    def _schedule_prebuild(self, argv: Sequence[str]) -> None:
        """Schedule the prebuild of the model of a worker that was just forked, for the next worker of this model."""
        if self._prebuilt is None or argv[0] != "serve":
            return
        with suppress(ValueError):
            command = from_argv(argv)
            assert isinstance(command, Serve)
            if command.snapshot not in self._to_prebuild and self._prebuilt.lacks(command):
                self._to_prebuild[command.snapshot] = (time.monotonic() + PREBUILD_DELAY, command)

    def _prebuild(self) -> None:
        """Advance the prebuilds by one step: end or start a trial, or drop outdated models. Called without orders."""
        if self._prebuilt is None:
            return
        now = time.monotonic()
        if self._trial is not None:
            if not select.select([self._trial.result], [], [], 0)[0] and now < self._trial.deadline:
                return
            trial, self._trial = self._trial, None
            if why := trial.end():
                print(f"{trial.command.snapshot} cannot be prebuilt, its workers load it: {why}", file=sys.stderr)
                self._prebuilt.exclude(trial.command)
                return
            # The same succeeded in the child a moment ago. If the files have changed since, workers report it.
            with suppress(Exception):
                _make(self._prebuilt, trial.command)
            self._report()
        elif self._to_prebuild:
            due, command = next(iter(self._to_prebuild.values()))
            if due <= now:
                del self._to_prebuild[command.snapshot]
                self._trial = PrebuildTrial(command, self._prebuilt)
        else:
            self._prebuilt.drop_stale()

    def _report(self, modules: Sequence[str] = ()) -> None:
        """Record the memory that children inherit, because they must not count it as their own, and report it."""
        resident = 0
        if (memory := sys.modules.get("worker.engines.transformers.device.memory")) is not None:
            memory.inheritance.survey()
            resident = memory.resident()
        self._channel.send(ModulesImported(modules=list(modules), resident=resident))

    def import_all(self, modules: Iterable[str]) -> None:
        """Import `modules` and report them. Failures are left to the worker that needs the module."""
        wanted = list(modules)
        for name in wanted:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - any error: a worker meets and reports it
                print(f"cannot import {name}: {error}", file=sys.stderr)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        _warm_caches()
        gc.collect()
        if not self._prebuilt:  # frozen objects are never freed, but prebuilt models must be when they are dropped
            gc.freeze()
        if (
            self._prebuilt is None
            and (prebuilt := sys.modules.get("worker.engines.transformers.preparation")) is not None
        ):
            self._prebuilt = prebuilt.prebuilt_models
        self._report([name for name in wanted if name in sys.modules])

    def _fork(self, id: int, descriptors: Sequence[int]) -> None:
        if why := unsafe_to_fork():
            self._channel.send(ForkRefused(id=id, why=why))
            return
        *streams, file = descriptors
        spec = ForkSpec(**json.loads(os.pread(file, os.fstat(file).st_size, 0)))
        may_start, start = os.pipe()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
        except OSError as error:
            os.close(may_start)
            os.close(start)
            self._channel.send(ForkRefused(id=id, why=f"cannot fork: {error.strerror}"))
            return
        if pid == 0:
            try:
                os.close(start)
                _become_worker(spec, streams, may_start)
                self._run(spec.argv)
            except BaseException:  # noqa: BLE001 - the end of the child; an executed worker prints it, too
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(may_start)
        # The event precedes the start: until it starts, the child is in this process's session, where the router finds
        # and kills it if the fork server dies.
        self._channel.send(Forked(id=id, pid=pid))
        with suppress(BrokenPipeError):
            os.write(start, b"!")
        os.close(start)
        self._schedule_prebuild(spec.argv)


class PrebuildTrial:
    """A child process that prebuilds a model and reports if that would harm the fork server."""

    def __init__(self, command: Serve, prebuilt_models: "PrebuiltModels"):
        self.command = command
        self.result, output = os.pipe()  # readable once the child has finished
        self.deadline = time.monotonic() + TRIAL_TIMEOUT
        parent = os.getpid()
        self._pid: int | None = None
        with suppress(OSError):
            self._pid = os.fork()
        if self._pid == 0:
            _run_trial(command, prebuilt_models, parent, output)
        os.close(output)

    def end(self) -> str:
        """End the child. Returns the reason not to prebuild the model here; empty if it is safe."""
        if self._pid is None:
            os.close(self.result)
            return "cannot fork"
        if not select.select([self.result], [], [], 0)[0]:
            os.kill(self._pid, signal.SIGKILL)
        with os.fdopen(self.result, encoding="utf-8", errors="replace") as file:
            why = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return (why or f"the trial ended with exit code {code}") if code else ""


def _make(prebuilt_models: "PrebuiltModels", command: Serve) -> None:
    """Build the parts of the model, and find the facts of its vocabulary and compile its chat template for this process
    and its children."""
    from worker.api.served_model import vocabulary_facts
    from worker.errors import StartError
    from worker.prompt.chat_template import ChatTemplate  # late: it imports jinja2

    prebuilt_models.build(command)
    if (made := prebuilt_models.find(command)) is not None:
        vocabulary_facts(made.tokenizer)
        with suppress(StartError):  # a worker reports a damaged template
            ChatTemplate(made.tokenizer, text="", variables="")


def _run_trial(command: Serve, prebuilt_models: "PrebuiltModels", parent: int, output: int) -> NoReturn:
    """Prebuild the model in the child, then check if the child could still fork."""
    try:
        supervision.die_with_parent(parent)
        _make(prebuilt_models, command)
        why = unsafe_to_fork()
    except BaseException as error:  # noqa: BLE001 - any error must stay out of the fork server
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    with suppress(OSError):
        os.write(output, why.encode())
    os._exit(1 if why else 0)


def unsafe_to_fork() -> str:
    """Return the reason why a fork of this process would not be safe; empty if it is safe.

    An initialized driver does not survive a fork. A driver that is only loaded does: libraries load CUDA's driver on
    import and initialize it at their first query of a device. `torch.cuda.is_initialized` is not sufficient, because
    counting devices initializes the driver too and leaves it false. So the driver is queried: each of its functions
    returns CUDA_ERROR_NOT_INITIALIZED before cuInit (CUDA Driver API, "Initialization"). HIP opens its device files
    during initialization.
    """
    if len(threads := os.listdir("/proc/self/task")) > 1:
        return f"it has {len(threads)} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized"
    with suppress(OSError, AttributeError):  # not loaded
        driver = ctypes.CDLL(CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        context = ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) != NOT_INITIALIZED:
            return "the CUDA driver is initialized"
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if (path := os.readlink(f"/proc/self/fd/{descriptor}")).startswith(DEVICE_FILES):
                return f"{path} is open"
    return ""


def _warm_caches() -> None:
    """Fill caches that libraries fill once per process for any model: transformers' rules for renaming the weights of
    old checkpoints (a thousand regular expressions, 0.2 s), and Jinja's lexer. In library versions that have them
    elsewhere this does nothing, and each worker fills its own."""
    renaming = sys.modules.get("transformers.conversion_mapping")
    with suppress(Exception):
        if renaming is not None:
            renaming.get_checkpoint_conversion_mapping("")
    templates = sys.modules.get("transformers.utils.chat_template_utils")
    with suppress(Exception):
        if templates is not None:
            templates._compile_jinja_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _become_worker(spec: ForkSpec, streams: Sequence[int], may_start: int) -> None:
    """Turn the forked child into a worker process: of the fork server only the modules remain."""
    if not os.read(may_start, 1):
        os._exit(supervision.ORPHANED)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # a collection would write to inherited objects and so copy their pages
    _set_command_line(spec.argv)
    os.environ.clear()
    os.environ.update(spec.env)
    _reseed()
    sys.argv = ["worker", *spec.argv]


def _reseed() -> None:
    """Seed all random generators, so that workers do not share their state."""
    random.seed()
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _set_command_line(argv: Sequence[str]) -> None:
    """Make /proc/self/cmdline, and so `ps`, show the worker's command line: write it over the fork server's arguments
    and environment, where the kernel reads it (proc_pid_cmdline(5)). The kernel reads beyond the end of the arguments
    only if their last byte is not zero, and then up to the first zero byte. Longer text is cut."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end, last = int(fields[45]), int(fields[46]), int(fields[48])  # arg_start, arg_end, env_end
    if not 0 < begin < end <= last:
        return
    text = " ".join([sys.executable, "-P", "-m", "worker", *argv]).encode()
    room = last - begin
    ctypes.memset(begin, 0, room)
    text = text.ljust(end - begin)[: room - 1]
    ctypes.memmove(begin, text, len(text))
