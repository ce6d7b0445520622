"""The fork server: a process with the imports done, which forks workers as its router orders.

It runs no model code and computes nothing. What it forks runs the same `main` as an executed worker, in a session of
its own, with the descriptors and the environment that it was handed and none of the nursery's.

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from worker import contract, leash

ALWAYS = (
    "torch", "transformers", "aiohttp.web", "tokenizers", "jinja2", "worker.engine.engine", "worker.server",
    "worker.estimate", "transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto",
    "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers",
    "transformers.modeling_layers", "transformers.conversion_mapping", "transformers.utils.chat_template_utils",
    "transformers.processing_utils", "transformers.video_utils",
    "encodings.unicode_escape",
)  # fmt: skip
"""Modules of every worker that computes, whatever its model."""
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
DEVICE_LIBRARIES = ("/libcuda.so", "/libamdhip64.so", "/libhsa-runtime64.so")

Run = Callable[[list[str]], NoReturn]


def serve(command: contract.Nursery, run: Run, *, modules: Sequence[str] = ALWAYS) -> int:
    """Import `modules`, then fork as ordered until the router is gone; returns the exit code.

    `run` is what a child does with its argv; it ends the process. Must be called in a process of one thread, with
    stdin open for as long as the router lives.
    """
    if not command.leashed:
        print("worker: a nursery is only of use to a router, which gives --leashed and --orders", file=sys.stderr)
        return contract.Exit.USAGE
    leash.bind(command.spawner)
    events = os.dup(1)
    os.dup2(2, 1)
    nursery = Nursery(socket.socket(fileno=command.orders), leash.Leash(events, leashed=True), run)
    nursery.import_all(modules)
    return nursery.serve()


class Nursery:
    """The loop: one thread, which waits for orders and for the end of stdin."""

    def __init__(self, orders: socket.socket, tied: leash.Leash, run: Run):
        self._orders = orders
        self._tied = tied
        self._run = run

    def serve(self) -> int:
        """Returns once the router has closed stdin or the socket of orders."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._orders, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if 0 in ready and not os.read(0, 4096):
                return leash.ORPHANED
            if self._orders.fileno() not in ready:
                continue
            packet, descriptors, _, _ = socket.recv_fds(self._orders, contract.MAX_ORDER_BYTES, 4)
            if not packet:
                return leash.ORPHANED
            try:
                self._obey(contract.decode_order(packet), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _obey(self, order: contract.Order, descriptors: Sequence[int]) -> None:
        match order:
            case contract.Fork():
                self._fork(order.id, descriptors)
            case contract.Reap():
                code = os.waitstatus_to_exitcode(os.waitpid(order.pid, 0)[1])
                self._tied.say(contract.Exited(pid=order.pid, code=code))
            case contract.Import():
                self.import_all(name for name in order.modules if contract.is_warmable(name))

    def import_all(self, modules: Iterable[str]) -> None:
        """Have `modules`, and say so. One that cannot be imported is a matter for the worker that needs it."""
        wanted = list(modules)
        for name in wanted:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever it is, a worker will meet and report it
                print(f"nursery: cannot import {name}: {error}", file=sys.stderr)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        _prime()
        # What is there now is there for good: no collection of a child looks at it, and so copies its pages.
        gc.collect()
        gc.freeze()
        if (memory := sys.modules.get("worker.engine.memory")) is not None:
            memory.inheritance.survey()
        self._tied.say(contract.Warm(modules=[name for name in wanted if name in sys.modules]))

    def _fork(self, id: int, descriptors: Sequence[int]) -> None:
        if why := unfit():
            self._tied.say(contract.Refused(id=id, why=why))
            return
        *streams, file = descriptors
        birth = contract.Birth(**json.loads(os.pread(file, os.fstat(file).st_size, 0)))
        told, tell = os.pipe()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
        except OSError as error:
            os.close(told)
            os.close(tell)
            self._tied.say(contract.Refused(id=id, why=f"cannot fork: {error.strerror}"))
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
        self._tied.say(contract.Born(id=id, pid=pid))
        with suppress(BrokenPipeError):
            os.write(tell, b"!")
        os.close(tell)


def unfit() -> str:
    """Why a fork of this process would not be safe; empty if it is."""
    if len(threads := os.listdir("/proc/self/task")) > 1:
        return f"it has {len(threads)} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        if mapped := next((line for line in maps if any(name in line for name in DEVICE_LIBRARIES)), ""):
            return f"{mapped.split()[-1]} is mapped"
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


def _become(birth: contract.Birth, streams: Sequence[int], told: int) -> None:
    """In the child: nothing is left of the nursery but its modules."""
    if not os.read(told, 1):
        os._exit(leash.ORPHANED)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
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
