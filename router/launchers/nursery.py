"""Spawning by fork: our end of the nursery.

The nursery is a child like any other, with a socket besides, on which it takes orders; its answers are events. It is
given the pipes of a worker to come, the worker's argv and environment, and forks it. Whoever waits for an answer in
vain takes the nursery for wedged and kills it, with its workers: it computes nothing that could take so long.

Law: a worker of a nursery is the nursery's child, so only the nursery can reap it, and does when told. Once the nursery
itself has ended, its children are ours, as orphans are.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from router.errors import RouterError
from router.launchers.process import Child, Log, Pipes
from worker import contract

log = logging.getLogger("router.launchers")

NAME = "nursery"
"""What it is called in logs and records."""
ANSWER_TIMEOUT = 20.0
"""Seconds for an answer to an order. A fork takes 10 ms; the import of a family's code before it, seconds at most."""
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
    ):
        """Takes `orders` over, and the events of `child`; `on_warm` is called each time it has done its imports."""
        self.child = child
        self._orders = orders
        self._ids = 0
        self._births: dict[int, asyncio.Future[int]] = {}
        self._born: set[int] = set()
        """Children that are not reaped yet."""
        self._reaps: dict[int, Callable[[int], None]] = {}
        self._modules: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self.pid = child.pid
        self.is_warm = False
        """It has its imports done."""
        self._on_warm = on_warm
        self._answer_timeout = answer_timeout
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
    ) -> "Nursery":
        """A new one; `program`: how a worker is executed, up to the verb; `env`: what its workers have in common;
        `answer_timeout`: seconds. Raises OSError if it cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                command = contract.Nursery(orders=theirs.fileno(), leashed=True, spawner=os.getpid())
                argv, passed = [*program, *contract.to_argv(command)], [theirs.fileno()]
                child = Child.spawn(argv, env, name=NAME, log=log, private=True, pass_fds=passed)
        except OSError:
            ours.close()
            raise
        return cls(child, ours, on_warm, answer_timeout=answer_timeout)

    @property
    def can_fork(self) -> bool:
        return self.is_warm and not self.child.exited.done()

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], *, name: str, log: Log) -> Child:
        """A new worker of `argv` (verb first), forked. Raises NurseryRefused, also when it is killed for its silence.

        Returns within `ANSWER_TIMEOUT`; must not be cancelled, as nobody would have the child.
        """
        try:
            pipes = Pipes()
        except OSError as error:
            raise NurseryRefused(error.strerror) from None
        try:
            pid = await self._birth(pipes, contract.Birth(argv=list(argv), env=dict(env)))
            try:
                return Child(pid, pipes, name, log, self._reap)
            except OSError as error:
                self._order(contract.Reap(pid=pid))  # its stdin will end, and so will it
                raise NurseryRefused(error.strerror) from None
        except NurseryRefused:
            pipes.close()
            raise

    async def _birth(self, pipes: Pipes, birth: contract.Birth) -> int:
        """Process id of a new child with the other ends of `pipes`. Raises NurseryRefused."""
        self._ids += 1
        id, answer = self._ids, self._loop.create_future()
        self._births[id] = answer
        try:
            self._order_fork(id, pipes, birth)
            pipes.close_theirs()
            async with asyncio.timeout(self._answer_timeout):
                pid: int = await answer
                return pid
        except TimeoutError:
            self._give_up()
            raise NurseryRefused("it does not answer") from None
        except OSError as error:
            raise NurseryRefused(error.strerror or type(error).__name__) from None
        finally:
            del self._births[id]

    def has(self, pid: int) -> bool:
        """Whether the process of that number, one that lives, was forked here."""
        return pid in self._born

    def warm(self, modules: Sequence[str]) -> None:
        """Have it import what a worker needed, as far as that is allowed and new, before it forks the next one."""
        wanted = [name for name in modules if contract.is_warmable(name) and name not in self._modules][
            :MODULES_AT_ONCE
        ]
        if wanted and self.can_fork:
            self._modules.update(wanted)
            self._order(contract.Import(modules=wanted))

    def _order_fork(self, id: int, pipes: Pipes, birth: contract.Birth) -> None:
        """Raises OSError."""
        file = os.memfd_create("birth", os.MFD_CLOEXEC)
        try:
            os.write(file, json.dumps(asdict(birth)).encode())
            socket.send_fds(self._orders, [contract.encode_order(contract.Fork(id=id))], [*pipes.theirs, file])
        finally:
            os.close(file)

    def _order(self, order: contract.Order) -> None:
        """If it cannot be told any more, it is ending."""
        try:
            self._orders.send(contract.encode_order(order))
        except BlockingIOError:  # hundreds of orders that it has not read
            self._give_up()
        except OSError:
            pass

    def _reap(self, pid: int, tell: Callable[[int], None]) -> None:
        self._born.discard(pid)
        self._reaps[pid] = tell
        if self.child.exited.done():
            self._reap_adopted(pid)
        else:
            self._order(contract.Reap(pid=pid))
            self._loop.call_later(self._answer_timeout, self._expect, pid)

    def _expect(self, pid: int) -> None:
        """By now it should have reaped `pid`."""
        if pid in self._reaps:
            self._give_up()

    def _give_up(self) -> None:
        if not self.child.exited.done():
            log.error("the nursery (process %d) does not answer and is killed, with its workers", self.pid)
            self.child.kill()

    def _hear(self, event: contract.Event) -> None:
        match event:
            case contract.Warm():
                if not self.is_warm:
                    log.info("the nursery (process %d) is warm: workers are forked from now on", self.pid)
                self.is_warm = True
                self._on_warm()
            case contract.Born() if (answer := self._births.get(event.id)) and not answer.done():
                self._born.add(event.pid)
                answer.set_result(event.pid)
            case contract.Refused() if (answer := self._births.get(event.id)) and not answer.done():
                answer.set_exception(NurseryRefused(event.why))
            case contract.Exited() if tell := self._reaps.pop(event.pid, None):
                tell(event.code)

    def _exited(self, _: "asyncio.Future[int]") -> None:
        """Its last words are heard; its children have become ours."""
        self._orders.close()
        for answer in self._births.values():
            if not answer.done():
                answer.set_exception(NurseryRefused("it has ended"))
        for pid in tuple(self._reaps):
            self._reap_adopted(pid)

    def _reap_adopted(self, pid: int) -> None:
        tell = self._reaps.pop(pid)
        try:
            _, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # it was reaped, and the nursery was killed before it could say so
            tell(KILLED)
        else:
            tell(os.waitstatus_to_exitcode(status))


__all__ = ["ANSWER_TIMEOUT", "NAME", "Nursery", "NurseryRefused"]
