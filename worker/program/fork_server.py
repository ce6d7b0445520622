"""The fork server: a process with the imports done, which forks workers as its router orders.

It computes nothing. What it forks runs the same `main` as an executed worker, in a session of its own, with the
descriptors and the environment that it was handed and none of the nursery's. Of models that it has forked workers for
it keeps ready what can be made without weights (`worker.engines.transformers.prebuilt_models`), each tried in a child first: whatever crashes,
hangs or starts a thread does so there.

Laws. One thread, and no device: a fork copies only the thread that called it, and no driver survives one. That is
looked at before every fork; if it is not so, the fork is refused and the router executes. A child that has ended stays
a zombie until the router says that it may be reaped, so that its number belongs to nobody else while the router still
uses it. Workers die with their nursery: nothing has to be handed over, and it does little that could fail.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from worker.program import supervision
from worker.protocol.argv import Nursery as NurseryCommand
from worker.protocol.argv import Serve, from_argv
from worker.protocol.events import Born, Exited, Here, Refused, Warm
from worker.protocol.exits import Exit
from worker.protocol.orders import MAX_ORDER_BYTES, Birth, Call, Fork, Import, Order, Reap, decode_order, is_warmable

if TYPE_CHECKING:
    from worker.engines.transformers.preparation import PrebuiltModels

ALWAYS = (
    "torch", "transformers", "aiohttp.web", "tokenizers", "jinja2", "worker.engines.transformers.engine", "worker.server.server",
    "worker.estimate.estimate", "transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto",
    "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers",
    "transformers.modeling_layers", "transformers.conversion_mapping", "transformers.utils.chat_template_utils",
    "transformers.processing_utils", "transformers.video_utils",
    "encodings.unicode_escape",
)  # fmt: skip
"""Modules of every worker that computes, whatever its model."""
DEVICE_FILES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/nvgpu", "/dev/dxg", "/dev/kfd", "/dev/dri/")
"""Held open by a driver that has been started: NVIDIA's, the same on Jetson and in WSL, AMD's."""
CUDA_DRIVER, NOT_INITIALIZED = "libcuda.so.1", 3
"""CUDA_ERROR_NOT_INITIALIZED of the driver's API."""
QUIET_BEFORE = 1.0
"""Seconds from the birth of a model's worker until what can be made of the model is: the worker has started by then."""
TRIAL_TIMEOUT = 60.0
TIDY_INTERVAL = 30.0

Run = Callable[[list[str]], NoReturn]


def serve(command: NurseryCommand, run: Run, *, modules: Sequence[str] = ALWAYS) -> int:
    """Import `modules`, then fork as ordered until the router is gone; returns the exit code.

    `run` is what a child does with its argv; it ends the process. Must be called in a process of one thread, with
    stdin open for as long as the router lives.
    """
    if not command.leashed:
        print("worker: a nursery is only of use to a router, which gives --leashed and --orders", file=sys.stderr)
        return Exit.USAGE
    supervision.bind(command.spawner)
    events = os.dup(1)
    os.dup2(2, 1)
    nursery = Nursery(socket.socket(fileno=command.orders), supervision.Leash(events, leashed=True), run)
    nursery.import_all(modules)
    return nursery.serve()


class Nursery:
    """The loop: one thread, which waits for orders and for the end of stdin."""

    def __init__(self, orders: socket.socket, tied: supervision.Leash, run: Run):
        self._orders = orders
        self._tied = tied
        self._run = run
        self._prebuilt: PrebuiltModels | None = None
        self._wanted: dict[str, tuple[float, Serve]] = {}
        """Models to keep ready, by snapshot: from when on (by the monotonic clock), and as what."""
        self._trial: Trial | None = None

    def serve(self) -> int:
        """Returns once the router has closed stdin or the socket of orders."""
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(self._orders, select.POLLIN)
            if self._trial is not None:
                poll.register(self._trial.told, select.POLLIN)
            ready = dict(poll.poll(self._patience()))
            if 0 in ready and not os.read(0, 4096):
                return supervision.ORPHANED
            if self._orders.fileno() not in ready:
                self._keep_ready()
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
                self._tied.say(Exited(pid=order.pid, code=code))
            case Import():
                self.import_all(name for name in order.modules if is_warmable(name))
            case Call():
                self._tied.say(Here())

    # What is kept ready

    def _patience(self) -> float | None:
        """Milliseconds until there is something to do unasked; None: nothing."""
        now = time.monotonic()
        if self._trial is not None:
            due = self._trial.ends
        elif self._wanted:
            due = min(due for due, _ in self._wanted.values())
        elif self._prebuilt:
            due = now + TIDY_INTERVAL
        else:
            return None
        return 1000 * max(0.0, due - now)

    def _want(self, argv: Sequence[str]) -> None:
        """A worker of `argv` was born: the next one may find its model ready."""
        if self._prebuilt is None or argv[0] != "serve":
            return
        with suppress(ValueError):
            command = from_argv(argv)
            assert isinstance(command, Serve)
            if command.snapshot not in self._wanted and self._prebuilt.lacks(command):
                self._wanted[command.snapshot] = (time.monotonic() + QUIET_BEFORE, command)

    def _keep_ready(self) -> None:
        """Nobody wants anything: see to the model whose turn it is."""
        if self._prebuilt is None:
            return
        now = time.monotonic()
        if self._trial is not None:
            if not select.select([self._trial.told], [], [], 0)[0] and now < self._trial.ends:
                return
            trial, self._trial = self._trial, None
            if why := trial.end():
                print(f"{trial.command.snapshot} is left to its workers: {why}", file=sys.stderr)
                self._prebuilt.exclude(trial.command)
                return
            with suppress(Exception):  # it went well a moment ago; if the files have changed since, its workers say so
                _make(self._prebuilt, trial.command)
            self._survey()
            self._tied.say(Warm())
        elif self._wanted:
            snapshot, (due, command) = min(self._wanted.items(), key=lambda each: each[1][0])
            if due <= now:
                del self._wanted[snapshot]
                self._trial = Trial(command, self._prebuilt)
        else:
            self._prebuilt.drop_stale()

    def _survey(self) -> None:
        """What children share of us, they do not count as their own."""
        if (memory := sys.modules.get("worker.engines.transformers.device.memory")) is not None:
            memory.inheritance.survey()

    def import_all(self, modules: Iterable[str]) -> None:
        """Have `modules`, and say so. One that cannot be imported is a matter for the worker that needs it."""
        wanted = list(modules)
        for name in wanted:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever it is, a worker will meet and report it
                print(f"cannot import {name}: {error}", file=sys.stderr)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        _prime()
        gc.collect()
        if not self._prebuilt:  # what is on it must be found when it goes
            gc.freeze()
        self._survey()
        if (
            self._prebuilt is None
            and (preparation := sys.modules.get("worker.engines.transformers.preparation")) is not None
        ):
            self._prebuilt = preparation.prebuilt_models
        self._tied.say(Warm(modules=[name for name in wanted if name in sys.modules]))

    def _fork(self, id: int, descriptors: Sequence[int]) -> None:
        if why := unfit():
            self._tied.say(Refused(id=id, why=why))
            return
        *streams, file = descriptors
        birth = Birth(**json.loads(os.pread(file, os.fstat(file).st_size, 0)))
        told, tell = os.pipe()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
        except OSError as error:
            os.close(told)
            os.close(tell)
            self._tied.say(Refused(id=id, why=f"cannot fork: {error.strerror}"))
            return
        if pid == 0:
            try:
                os.close(tell)
                _become(birth, streams, told)
                self._run(birth.argv)
            finally:
                os._exit(1)
        os.close(told)
        # It is announced before it is let go: until then it is in our session, and is found there if we die.
        self._tied.say(Born(id=id, pid=pid))
        with suppress(BrokenPipeError):
            os.write(tell, b"!")
        os.close(tell)
        self._want(birth.argv)


class Trial:
    """A child that makes of a model what is to be kept ready of it, and tells whether that would have done harm."""

    def __init__(self, command: Serve, prebuilt_models: "PrebuiltModels"):
        self.command = command
        self.told, tell = os.pipe()
        self.ends = time.monotonic() + TRIAL_TIMEOUT
        parent = os.getpid()
        self._pid: int | None = None
        with suppress(OSError):
            self._pid = os.fork()
        if self._pid == 0:
            _try(command, prebuilt_models, parent, tell)
        os.close(tell)

    def end(self) -> str:
        """Returns once the child is gone: why it would be wrong to do the same here; empty if it is right."""
        if self._pid is None:
            os.close(self.told)
            return "cannot fork"
        if not select.select([self.told], [], [], 0)[0]:
            os.kill(self._pid, signal.SIGKILL)
        with os.fdopen(self.told, encoding="utf-8", errors="replace") as told:
            said = told.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return (said or f"its trial ended with exit code {code}") if code else ""


def _make(prebuilt_models: "PrebuiltModels", command: Serve) -> None:
    """Build the model's parts, and compile its chat template once for this process and its children."""
    from worker.errors import StartError
    from worker.prompt.chat_template import ChatTemplate  # late: it imports jinja2

    prebuilt_models.build(command)
    if (made := prebuilt_models.find(command)) is not None:
        with suppress(StartError):  # a worker reports a damaged template itself
            ChatTemplate(made.tokenizer, text="", variables="")


def _try(command: Serve, prebuilt_models: "PrebuiltModels", parent: int, tell: int) -> NoReturn:
    """In the child: make it, and look at what that has done to this process."""
    try:
        supervision.bind(parent)
        _make(prebuilt_models, command)
        why = unfit()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the nursery must not do it
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    with suppress(OSError):
        os.write(tell, why.encode())
    os._exit(1 if why else 0)


def unfit() -> str:
    """Why a fork of this process would not be safe; empty if it is.

    A driver that was started does not survive a fork. One that is merely loaded does: libraries load CUDA's when they
    are imported, and start it when they first ask for a device. torch does not know whether somebody else did: a look
    at the number of devices starts it, too, and leaves `is_initialized` false. So the driver itself is asked: each of
    its functions returns CUDA_ERROR_NOT_INITIALIZED until cuInit has been called (CUDA Driver API, "Initialization").
    HIP opens its device files when it starts.
    """
    if len(threads := os.listdir("/proc/self/task")) > 1:
        return f"it has {len(threads)} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    with suppress(OSError, AttributeError):  # it is not loaded
        driver = ctypes.CDLL(CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        context = ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) != NOT_INITIALIZED:
            return "the CUDA driver is started"
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if (path := os.readlink(f"/proc/self/fd/{descriptor}")).startswith(DEVICE_FILES):
                return f"{path} is open"
    return ""


def _prime() -> None:
    """Have what libraries work out once in each process, whatever the model: the rules by which transformers renames
    the weights of old checkpoints (a thousand regular expressions, 0.2 s), and Jinja's lexer. Where a version of theirs
    has these elsewhere, each worker works them out for itself, as an executed one does."""
    renaming = sys.modules.get("transformers.conversion_mapping")
    with suppress(Exception):
        if renaming is not None:
            renaming.get_checkpoint_conversion_mapping("")
    templates = sys.modules.get("transformers.utils.chat_template_utils")
    with suppress(Exception):
        if templates is not None:
            templates._compile_jinja_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _become(birth: Birth, streams: Sequence[int], told: int) -> None:
    """In the child: nothing is left of the nursery but its modules."""
    if not os.read(told, 1):
        os._exit(supervision.ORPHANED)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # what is there now is there for good: no collection looks at it, and so copies its pages
    _show(birth.argv)
    os.environ.clear()
    os.environ.update(birth.env)
    _reseed()
    sys.argv = ["worker", *birth.argv]


def _reseed() -> None:
    """No two workers draw the same numbers. Python's own `random` sees to itself after a fork; to be sure, again."""
    random.seed()
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _show(argv: Sequence[str]) -> None:
    """Have /proc/self/cmdline, and so `ps`, show the worker's own words: written over the nursery's arguments and
    environment, where the kernel reads them (proc_pid_cmdline(5)). Past the end of the arguments it reads on only if
    their last byte is not zero, and then up to the first that is; what does not fit is cut."""
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
