"""Spawning by fork: our end of the nursery.

The nursery is a child like any other, with a socket besides, on which it takes orders; its answers are events. It is
given the pipes of a worker to come, the worker's argv and environment, and forks it. Now and then it is called, so that
one that hangs is found before anybody needs it; it computes nothing that could keep it from answering for long. If it
does not, it is killed and replaced; but as long as workers of its own live, which would die with it, it is only let be:
others are executed, and if it answers again, it is used again.

Law: a worker of a nursery is the nursery's child, so only the nursery can reap it, and does when told. Until one that
does not answer has done so, how its children ended is read where the kernel shows it. Once the nursery itself has
ended, its children are ours, as orphans are.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from router.errors import RouterError
from router.launch import reaper
from router.launch.process import Child, Log, Pipes
from worker.protocol.argv import ForkServerOptions as NurseryCommand
from worker.protocol.argv import to_argv
from worker.protocol.events import Event, Exit, Forked, ForkRefused, ModulesImported, Pong, Reaped
from worker.protocol.orders import Fork, ForkSpec, ImportModules, Order, Ping, Reap, encode_order, is_family_module

log = logging.getLogger("router.launch.interface")

NAME = "nursery"
"""What it is called in logs and records."""
ANSWER_TIMEOUT = 20.0
"""Seconds for an answer to an order. A fork takes 10 ms; the import of a family's code before it, seconds at most."""
CALL_INTERVAL = 10.0
"""Seconds until one of which nobody wants anything is called: two packets, 0.1 ms of a processor."""
STOPPED_INTERVAL = 1.0
"""Seconds between two looks at one that owes an answer: whether it was stopped, and so cannot have begun."""
LATE = 1.0
"""Seconds by which our own timer may be late before its silence counts: else it may have been ours, too."""
MODULES_AT_ONCE = 100
"""Of one worker that are imported; a family has a handful."""
KILLED = -9
"""Exit code of a worker whose own nobody has heard: it died with its nursery."""


class NurseryRefused(RouterError):
    """It cannot fork now; whoever wants a process must start one in another way."""


class Nursery:
    """One nursery process, from its birth to its end."""

    def __init__(
        self,
        child: Child,
        orders: socket.socket,
        on_warm: Callable[[], None],
        *,
        answer_timeout: float = ANSWER_TIMEOUT,
        call_interval: float = CALL_INTERVAL,
    ):
        """Takes `orders` over, and the events of `child`; `on_warm` is called each time it has done its imports."""
        self.child = child
        self._orders = orders
        self._ids = 0
        self._births: dict[int, asyncio.Future[int]] = {}
        self._born: set[int] = set()
        """Children that are not reaped yet."""
        self._reaps: dict[int, Callable[[int], None]] = {}
        self._zombies: set[int] = set()
        """Children whose end was told while it did not answer: it has yet to reap them."""
        self._modules: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self.pid = child.pid
        self.is_warm = False
        """It has its imports done."""
        self.is_silent = False
        """It has not answered in time, and has said nothing since."""
        self._on_warm = on_warm
        self._answer_timeout = answer_timeout
        self._call_interval = call_interval
        self._is_called = False
        """It owes us a sign of life."""
        self._until = self._due = 0.0
        """When its silence counts, and when it is looked at next."""
        self._timer: asyncio.TimerHandle | None = None
        child.on_event = self._hear
        child.exited.add_done_callback(self._exited)

    @classmethod
    def start(
        cls,
        program: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Log,
        on_warm: Callable[[], None],
        answer_timeout: float = ANSWER_TIMEOUT,
        call_interval: float = CALL_INTERVAL,
    ) -> "Nursery":
        """A new one; `program`: how a worker is executed, up to the verb; `env`: what its workers have in common;
        `answer_timeout`, `call_interval`: seconds. Raises OSError if it cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                command = NurseryCommand(orders=theirs.fileno(), supervised=True, parent_pid=os.getpid())
                argv, passed = [*program, *to_argv(command)], [theirs.fileno()]
                child = Child.spawn(argv, env, name=NAME, log=log, private=True, pass_fds=passed)
        except OSError:
            ours.close()
            raise
        return cls(child, ours, on_warm, answer_timeout=answer_timeout, call_interval=call_interval)

    @property
    def can_fork(self) -> bool:
        return self.is_warm and not self.is_silent and not self.child.exited.done()

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], *, name: str, log: Log) -> Child:
        """A new worker of `argv` (verb first), forked. Raises NurseryRefused, also when it does not answer in time.

        Returns within that time of the last that it said; must not be cancelled, as nobody would have the child.
        """
        try:
            pipes = Pipes()
        except OSError as error:
            raise NurseryRefused(error.strerror) from None
        try:
            pid = await self._birth(pipes, ForkSpec(argv=list(argv), env=dict(env)))
            try:
                return Child(pid, pipes, name, log, self._reap)
            except OSError as error:
                self._order(Reap(pid=pid))  # its stdin will end, and so will it
                raise NurseryRefused(error.strerror) from None
        except NurseryRefused:
            pipes.close()
            raise

    async def _birth(self, pipes: Pipes, birth: ForkSpec) -> int:
        """Process id of a new child with the other ends of `pipes`. Raises NurseryRefused."""
        self._ids += 1
        id, answer = self._ids, self._loop.create_future()
        try:
            self._order_fork(id, pipes, birth)
            pipes.close_theirs()
            self._expect(lambda: self._births.update({id: answer}))
            pid: int = await answer
            return pid
        except OSError as error:
            raise NurseryRefused(error.strerror or type(error).__name__) from None
        finally:
            self._births.pop(id, None)

    def has(self, pid: int) -> bool:
        """Whether the process of that number, one that lives, was forked here."""
        return pid in self._born

    def warm(self, modules: Sequence[str]) -> None:
        """Have it import what a worker needed, as far as that is allowed and new, before it forks the next one."""
        wanted = [name for name in modules if is_family_module(name) and name not in self._modules][:MODULES_AT_ONCE]
        if wanted and self.can_fork:
            self._modules.update(wanted)
            self._order(ImportModules(modules=wanted))

    def _order_fork(self, id: int, pipes: Pipes, birth: ForkSpec) -> None:
        """Raises OSError."""
        file = os.memfd_create("birth", os.MFD_CLOEXEC)
        try:
            os.write(file, json.dumps(asdict(birth)).encode())
            socket.send_fds(self._orders, [encode_order(Fork(id=id))], [*pipes.theirs, file])
        finally:
            os.close(file)

    def _order(self, order: Order) -> None:
        """If it cannot be told any more, it is ending."""
        try:
            self._orders.send(encode_order(order))
        except BlockingIOError:  # hundreds of orders that it has not read
            self._give_up()
        except OSError:
            pass

    def _reap(self, pid: int, tell: Callable[[int], None]) -> None:
        self._born.discard(pid)
        if self.child.exited.done():
            self._reaps[pid] = tell
            self._reap_adopted(pid)
            return
        self._order(Reap(pid=pid))
        if self.is_silent:
            self._reaps[pid] = tell
            self._do_without()
        else:
            self._expect(lambda: self._reaps.update({pid: tell}))

    # Whether it answers

    @property
    def _owes(self) -> bool:
        return bool(self._births or self._reaps or self._is_called)

    def _expect(self, note: Callable[[], object]) -> None:
        """An answer, which `note` notes down: in time, counted from now, or from what it says meanwhile."""
        is_first = not self._owes
        note()
        if is_first:
            self._arm()

    def _arm(self) -> None:
        """From now on it is silent."""
        self._until = self._loop.time() + (self._answer_timeout if self._owes else self._call_interval)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = min(self._until, self._loop.time() + STOPPED_INTERVAL) if self._owes else self._until
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = self._loop.time() - self._due
        before = self._timer
        self.child.read()  # what it said while we were busy
        if self.child.exited.done() or self._timer is not before:
            return
        if not self._owes:
            self._order(Ping())
            self._is_called = True
            self._arm()
        elif late > LATE:  # we slept, or were stopped, and perhaps it was, too
            self._arm()
        elif self._due < self._until and not _is_stopped(self.pid):
            self._set_timer()
        else:
            self._miss()

    def _miss(self) -> None:
        """It hangs."""
        self.is_silent = True
        for answer in self._births.values():
            if not answer.done():
                answer.set_exception(NurseryRefused("it does not answer"))
        self._births.clear()
        self._do_without()
        if self._born:
            log.error(
                "the nursery (process %d) does not answer; it is left alone as long as its workers live (%d), and"
                " others are executed",
                self.pid,
                len(self._born),
            )

    def _do_without(self) -> None:
        """Tell the ends that it should have told: all that such a child still holds is its number. It is killed once
        no worker lives that would die with it."""
        for pid in tuple(self._reaps):
            self._zombies.add(pid)
            self._reaps.pop(pid)(_exit_code(pid))
        if not self._born:
            self._give_up()

    def _give_up(self) -> None:
        if not self.child.exited.done():
            log.error("the nursery (process %d) does not answer and is killed, with its workers", self.pid)
            self.child.kill()

    def _hear(self, event: Event) -> None:
        if self.is_silent:
            self.is_silent = False
            log.warning("the nursery (process %d) answers again", self.pid)
        match event:
            case ModulesImported():
                if not self.is_warm:
                    log.info("the nursery (process %d) is warm: workers are forked from now on", self.pid)
                self.is_warm = True
                self._on_warm()
            case Forked() if (answer := self._births.pop(event.id, None)) and not answer.done():
                self._born.add(event.pid)
                answer.set_result(event.pid)
            case Forked():  # whoever wanted it gave up: it finds the end of its stdin, and ends
                self._reap(event.pid, lambda code: None)
            case ForkRefused() if (answer := self._births.pop(event.id, None)) and not answer.done():
                answer.set_exception(NurseryRefused(event.why))
            case Reaped():
                self._zombies.discard(event.pid)
                if tell := self._reaps.pop(event.pid, None):
                    tell(event.code)
            case Pong():
                self._is_called = False
        self._arm()

    def _exited(self, _: "asyncio.Future[int]") -> None:
        """Its last words are heard; its children have become ours."""
        if self._timer is not None:
            self._timer.cancel()
        self._orders.close()
        for answer in self._births.values():
            if not answer.done():
                answer.set_exception(NurseryRefused("it has ended"))
        for pid in tuple(self._reaps):
            self._reap_adopted(pid)
        reaper.reap(self._zombies)

    def _reap_adopted(self, pid: int) -> None:
        tell = self._reaps.pop(pid)
        try:
            _, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # it was reaped, and the nursery was killed before it could say so
            tell(KILLED)
        else:
            code = os.waitstatus_to_exitcode(status)
            # where the kernel had not heard yet whom to end with the nursery, it has seen for itself that it lost it
            tell(KILLED if code == Exit.ORPHANED else code)


def _is_stopped(pid: int) -> bool:
    """Whether somebody has sent that process SIGSTOP, or the like (proc_pid_stat(5), field 3)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or we have no descriptor left
        return False


def _exit_code(pid: int) -> int:
    """Of a child of somebody else's that has ended and is not reaped (proc_pid_stat(5), field 52)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return os.waitstatus_to_exitcode(int(file.read().rpartition(")")[2].split()[49]))
    except (OSError, ValueError):  # it has just been reaped, or we have no descriptor left
        return KILLED


__all__ = ["ANSWER_TIMEOUT", "CALL_INTERVAL", "NAME", "Nursery", "NurseryRefused"]
