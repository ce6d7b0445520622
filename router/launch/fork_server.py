"""The router's end of the fork server, a process that has the imports done and forks workers.

It is a child process like any other, with a socket besides, on which it gets orders; its replies are events. An order
to fork carries the pipes, the argv and the environment of the new worker.

It never computes for long, so a missing reply means that it hangs. It is then killed and replaced, unless it has living
workers, which would die with it. In that case it is only left unused: new workers are started by exec, and if it
replies again, it is used again.

A forked worker is the fork server's child, so only the fork server can reap it, and does so on order. While it does not
reply, the exit codes of its children are read from /proc. Once it has exited itself, its children pass to the router,
which is a subreaper.
"""

import asyncio
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from router.errors import RouterError
from router.launch.exit_causes import describe_exit
from router.launch.process import MAX_LATENESS, UNKNOWN_EXIT, Child, Log, Pipes, uncancelled
from router.launch.process_table import ProcessTable, process_stat, reap
from worker.protocol.argv import Command, ForkServerOptions, to_argv
from worker.protocol.events import Event, Exit, Forked, ForkRefused, ModulesImported, Reaped
from worker.protocol.memory import FORK_SERVER_BYTES, LIBRARY_CODE_BYTES
from worker.protocol.orders import Fork, ForkSpec, ImportModules, Order, Reap, encode_order, is_family_module

log = logging.getLogger("router.launch.fork_server")

NAME = "fork-server"  # in logs
# Seconds for a reply. A fork takes 10 ms; the import of a model family before it, seconds at most.
REPLY_TIMEOUT = 20.0
# Seconds from its start for which loads wait for its imports, which take 3 s, or 40 on a busy machine. A guess.
IMPORT_TIMEOUT = 120.0
MAX_MODULES = 100  # modules of one worker that are imported; a family has a handful
KILLED = -9  # exit code of a worker that died with its fork server, so that its own code is unknown
FIRST_PAUSE = 1.0  # seconds until a fork server that has exited is replaced; doubles each time
LONGEST_PAUSE = 60.0  # the largest pause; one that lived longer than this is replaced after FIRST_PAUSE again
REFUSAL_PAUSE = 60.0  # seconds for which the planner does not count on a fork server that refused to fork


class ForkFailed(RouterError):
    """The fork server cannot fork now; the process must be started in another way."""


class ForkServerProcess:
    """One fork server process, from its start to its exit."""

    def __init__(
        self,
        program: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Log,
        on_warm: Callable[[], None],
        import_timeout: float = IMPORT_TIMEOUT,
    ):
        """Start a fork server.

        `program`: the worker command up to the verb. `env`: what its workers have in common. `on_warm`: called each
        time it has done imports. Raises OSError if it cannot be started.
        """
        # SEQPACKET: orders keep their borders, and a broken one cannot shift the following ones.
        orders, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders.setblocking(False)
        try:
            with child_end:
                command = ForkServerOptions(orders=child_end.fileno(), supervised=True, parent_pid=os.getpid())
                argv, passed = [*program, *to_argv(command)], [child_end.fileno()]
                child = Child.spawn(argv, env, name=NAME, log=log, private=True, pass_fds=passed)
        except OSError:
            orders.close()
            raise
        self.child = child
        self.pid = child.pid
        self.is_warm = False  # its imports are done
        self.settled = asyncio.Event()  # its imports are done or take too long, or it has exited
        self.is_silent = False  # it owes a reply and is late with it
        self.resident = 0  # bytes of main memory, as it last reported; 0: not yet
        self.reply_timeout = REPLY_TIMEOUT
        self._loop = asyncio.get_running_loop()
        self._orders = orders
        self._on_warm = on_warm
        self._last_id = 0
        self._forks: dict[int, asyncio.Future[int]] = {}  # forks that were ordered: their process ids
        self._forked: set[int] = set()  # children that are not reaped yet
        self._reaps: dict[int, Callable[[int], None]] = {}  # reaps that were ordered: the receivers of the exit codes
        self._zombies: set[int] = set()  # children whose exit was reported without it: it has yet to reap them
        self._modules: set[str] = set()  # modules that it was ordered to import
        self._timer: asyncio.TimerHandle | None = None  # runs while it owes a reply
        self._settling = self._loop.call_later(import_timeout, self.settled.set)
        child.on_event = self._on_event
        child.exited.add_done_callback(self._on_exited)

    @property
    def can_fork(self) -> bool:
        return self.is_warm and not self.is_silent and not self.child.exited.done()

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], *, name: str, log: Log) -> Child:
        """Fork a worker of `argv` (verb first). Raises ForkFailed, also if there is no reply in time.

        Must not be cancelled, as the child would then have no owner.
        """
        try:
            pipes = Pipes()
        except OSError as error:
            raise ForkFailed(error.strerror) from None
        self._last_id += 1
        id, pid, reply = self._last_id, 0, self._loop.create_future()
        try:
            self._send_fork(id, pipes, ForkSpec(argv=list(argv), env=dict(env)))
            pipes.close_child_ends()
            self._forks[id] = reply
            self._expect_reply()
            pid = await reply
            return Child(pid, pipes, name, log, self._reap, forked=True)
        except OSError as error:
            if pid:
                self._send(Reap(pid=pid))  # closing the pipes ends its stdin, and so the worker
            pipes.close()
            raise ForkFailed(error.strerror or type(error).__name__) from None
        except ForkFailed:
            pipes.close()
            raise
        finally:
            self._forks.pop(id, None)

    def warm(self, modules: Sequence[str]) -> None:
        """Order the import of modules that a worker needed, as far as allowed and new, before the next fork."""
        wanted = [name for name in modules if is_family_module(name) and name not in self._modules][:MAX_MODULES]
        if wanted and self.can_fork:
            self._modules.update(wanted)
            self._send(ImportModules(modules=wanted))

    def _send_fork(self, id: int, pipes: Pipes, spec: ForkSpec) -> None:
        """Raises OSError."""
        # argv and environment can be longer than a packet, so they go into a memory file whose descriptor is sent.
        file = os.memfd_create("fork", os.MFD_CLOEXEC)
        try:
            os.write(file, json.dumps(asdict(spec)).encode())
            socket.send_fds(self._orders, [encode_order(Fork(id=id))], [*pipes.child_ends, file])
        finally:
            os.close(file)

    def _send(self, order: Order) -> None:
        try:
            self._orders.send(encode_order(order))
        except BlockingIOError:  # hundreds of orders that it has not read
            self._kill_unresponsive()
        except OSError:  # it is exiting
            pass

    def _reap(self, pid: int, report: Callable[[int], None]) -> None:
        """Have it reap its child `pid`, which has exited, and pass the exit code to `report`."""
        self._forked.discard(pid)
        self._reaps[pid] = report
        if self.child.exited.done():
            self._reap_adopted(pid)
            return
        self._send(Reap(pid=pid))
        if self.is_silent:
            self._report_unreaped()
        else:
            self._expect_reply()

    # Detecting that it hangs

    def _expect_reply(self) -> None:
        """Count its silence, from now, or from its last event if it owes a reply already."""
        if self._timer is None:
            self._restart_timer()

    def _restart_timer(self) -> None:
        """Count its silence from now on, if it owes a reply."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._forks or self._reaps:
            self._timer = self._loop.call_later(self.reply_timeout, self._check)

    def _check(self) -> None:
        timer = self._timer
        assert timer is not None
        lateness = self._loop.time() - timer.when()
        self.child.read()  # events that arrived while this process was busy
        if self.child.exited.done() or self._timer is not timer:  # an event has restarted the timer
            return
        if lateness > MAX_LATENESS:  # the whole machine may have been suspended, and the fork server with it
            self._restart_timer()
        else:
            self._timer = None
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        """It hangs: fail the forks that were ordered, and report exits in its place."""
        self.is_silent = True
        for reply in self._forks.values():
            if not reply.done():
                reply.set_exception(ForkFailed("it does not answer"))
        self._forks.clear()
        self._report_unreaped()
        if self._forked:
            log.error(
                "the fork server (process %d) does not answer; it is left alone as long as its workers live (%d), and"
                " others are started by exec",
                self.pid,
                len(self._forked),
            )

    def _report_unreaped(self) -> None:
        """Report the exits that it should have reported. A zombie holds nothing but its number.

        Kill the fork server if it has no running workers, which would end with it.
        """
        for pid in tuple(self._reaps):
            self._zombies.add(pid)
            self._reaps.pop(pid)(_exit_code(pid))
        if not self._forked:
            self._kill_unresponsive()

    def _kill_unresponsive(self) -> None:
        if not self.child.exited.done():
            log.error("the fork server (process %d) does not answer and is killed, with its workers", self.pid)
            self.child.kill()

    def _on_event(self, event: Event) -> None:
        if self.is_silent:
            self.is_silent = False
            log.warning("the fork server (process %d) answers again", self.pid)
        match event:
            case ModulesImported():
                if not self.is_warm:
                    log.info("the fork server (process %d) is warm: workers are forked from now on", self.pid)
                self.is_warm = True
                self.settled.set()
                self.resident = event.resident or self.resident
                self._on_warm()
            case Forked() if (reply := self._forks.pop(event.id, None)) and not reply.done():
                self._forked.add(event.pid)
                reply.set_result(event.pid)
            case Forked():  # the fork was given up meanwhile: the worker finds the end of its stdin and exits
                self._reap(event.pid, lambda code: None)
            case ForkRefused() if (reply := self._forks.pop(event.id, None)) and not reply.done():
                reply.set_exception(ForkFailed(event.why))
            case Reaped():
                self._zombies.discard(event.pid)
                if report := self._reaps.pop(event.pid, None):
                    report(event.code)
        self._restart_timer()

    def _on_exited(self, _: "asyncio.Future[int]") -> None:
        """All its events have been read, and its children have become ours."""
        self.settled.set()
        self._settling.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._orders.close()
        for reply in self._forks.values():
            if not reply.done():
                reply.set_exception(ForkFailed("it has ended"))
        for pid in tuple(self._reaps):
            self._reap_adopted(pid)
        reap(self._zombies)

    def _reap_adopted(self, pid: int) -> None:
        report = self._reaps.pop(pid)
        try:
            _, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # the fork server reaped it and was killed before it could report that
            report(KILLED)
        else:
            code = os.waitstatus_to_exitcode(status)
            # Workers die with the fork server by a signal of the kernel (PR_SET_PDEATHSIG). One that was forked a
            # moment ago may not have asked for it yet; it then notices the loss and exits as ORPHANED. Both mean the
            # same.
            report(KILLED if code == Exit.ORPHANED else code)


class ForkServerSupervisor:
    """Keeps one fork server running, from `start` to `stop`, and forks through it."""

    def __init__(
        self,
        processes: ProcessTable,
        program: Sequence[str],
        environment: Callable[..., Mapping[str, str]],
        first_pause: float = FIRST_PAUSE,
    ):
        """`program`: the worker command up to the verb. `environment`: that of a fork server, by its `tag`."""
        self.server: ForkServerProcess | None = None  # the one that runs now; it may not be warm yet
        self.on_warm: Callable[[], None] = lambda: None
        self._processes = processes
        self._program = tuple(program)
        self._environment = environment
        self._first_pause = first_pause
        self._task: asyncio.Task[None] | None = None
        self._refused_at = -math.inf  # when a fork server last refused to fork, by the loop's clock

    @property
    def pid(self) -> int:
        """The process id of the fork server; 0: none runs."""
        return self.server.pid if self.server is not None else 0

    @property
    def resident(self) -> int:
        """Bytes of main memory of the fork server, which its workers share. Assumed until it has reported them."""
        reported = self.server.resident if self.server is not None else 0
        return (reported or FORK_SERVER_BYTES) + LIBRARY_CODE_BYTES

    @property
    def can_fork(self) -> bool:
        return self.server is not None and self.server.can_fork

    @property
    def is_reliable(self) -> bool:
        """True unless a fork server has refused to fork within REFUSAL_PAUSE."""
        return asyncio.get_running_loop().time() - self._refused_at > REFUSAL_PAUSE

    async def imported(self) -> None:
        """Wait until the present fork server has done its imports or has exited, or IMPORT_TIMEOUT has passed since its
        start. Return at once if none runs."""
        if self.server is not None:
            await self.server.settled.wait()

    def warm(self, modules: Sequence[str]) -> None:
        """Have the fork server, if one runs, import modules that a worker needed."""
        if self.server is not None:
            self.server.warm(modules)

    def start(self) -> "asyncio.Task[None]":
        """Begin. The returned task never ends by itself."""
        self._task = asyncio.create_task(self._run(), name=NAME)
        return self._task

    async def stop(self) -> None:
        """End the fork server. Its workers must have been reaped before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def spawn(self, command: Command, env: Mapping[str, str], *, name: str, output: Log) -> Child | None:
        """Fork a worker for `command`. Returns None if the fork server refuses, which is logged.

        Must not be cancelled, like `ForkServerProcess.spawn`.
        """
        assert self.server is not None
        # The worker checks that its parent is still the process that forked it.
        argv = to_argv(replace(command, supervised=True, parent_pid=self.server.pid))
        try:
            return await self.server.spawn(argv, env, name=name, log=output)
        except ForkFailed as refused:
            self._refused_at = asyncio.get_running_loop().time()
            log.warning("%s: the fork server cannot fork it, so it is started by exec: %s", name, refused)
            return None

    async def _run(self) -> None:
        """Run fork servers one after the other, with a pause between them; never returns."""
        loop = asyncio.get_running_loop()
        pause = self._first_pause
        while True:
            began = loop.time()
            try:
                await self._run_one()
            except OSError as error:
                log.warning("cannot start the fork server: %s", error.strerror or error)
            if loop.time() - began > LONGEST_PAUSE:
                pause = self._first_pause
            log.warning("workers are started by exec until there is another fork server, in %g s", pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _run_one(self) -> None:
        """Run one fork server from its start to its exit. Raises OSError if it cannot be started."""
        tag = self._processes.folder.tag("", NAME)
        env = self._environment(tag=tag)
        self.server = ForkServerProcess(self._program, env, log=Log(NAME, NAME), on_warm=lambda: self.on_warm())
        child = self.server.child
        try:
            self._processes.add(tag, child, NAME)
            code = await asyncio.shield(child.exited)
            log.warning("the fork server %s", describe_exit(code, child.cause, oom_killed=False))
        finally:
            self.server = None
            await uncancelled(self._processes.end(tag))


def _exit_code(pid: int) -> int:
    """The exit code of a zombie that is not our child (proc_pid_stat(5), field 52).

    The kernel shows 0 to users who may not trace the process, and workers are not dumpable: only root may.
    """
    try:
        fields = process_stat(pid)
    except OSError:  # no descriptor left
        fields = None
    if fields is None:
        return KILLED
    return os.waitstatus_to_exitcode(int(fields[49])) or UNKNOWN_EXIT
