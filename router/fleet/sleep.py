"""Who sleeps: of models that had to leave, those whose weights stay in main memory, within a budget.

The fleet says what may be taken; a holding begins only in memory that nobody needs, and lives in `router.fleet.sleeping_weights`.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from router.events import EventLog
from router.fleet.model import Model
from router.fleet.sleeping_weights import Holding, Wish, hold, make_room
from router.fleet.state import State
from router.launch.interface import Launcher


class Sleepers:
    """All holdings of one fleet. Law: like the fleet's, no method awaits."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        events: EventLog,
        budget: int,
        ids: Iterator[int],
        tasks: set[asyncio.Task[None]],
        now: Callable[[], float],
        changed: Callable[[], None],
    ):
        """`budget`: bytes that holdings may take in all; `ids` and `tasks` are the fleet's, which waits for the latter
        to end; `changed` is called when a plan depends on what became of one."""
        self._launcher = launcher
        self._events = events
        self._budget = budget
        self._ids = ids
        self._tasks = tasks
        self._now = now
        self._changed = changed
        self.holdings: dict[int, Holding] = {}
        """All that are not stopped, by id."""

    def put_to_sleep(self, models: Iterable[Model], spare: int) -> None:
        """Hold the weights of those who have just left, as far as there are so many bytes that nobody needs; let go of
        those whose model is loaded again."""
        for model in models:
            if model.holding is None and model.wish is None:
                continue
            if model.holding is not None and any(worker.state is State.READY for worker in model.workers):
                self.let_go(model, "awake")
            wish, model.wish = model.wish, None
            if wish is None or model.workers or model.holding is not None or wish.size > spare:
                continue
            gone = make_room(self.holdings.values(), wish.size, self._budget)
            if gone is None:
                continue
            for holding in gone:
                self.release(holding, "evicted")
            spare -= wish.size
            self._begin(model, wish)

    def let_go(self, model: Model, reason: str) -> None:
        """It sleeps no longer, and is not to."""
        model.wish = None
        if model.holding is not None:
            self.release(model.holding, reason)

    def release(self, holding: Holding, reason: str) -> None:
        """Let it go: like a worker that is retired, it is in nobody's way from now on."""
        if not holding.released.is_set():
            holding.release(reason)
            self._changed()

    def _begin(self, model: Model, wish: Wish) -> None:
        holding = Holding(next(self._ids), model.preset, wish)
        model.holding = self.holdings[holding.id] = holding
        life = hold(holding, self._launcher, self._events, self._changed)
        task = asyncio.get_running_loop().create_task(life, name=str(holding))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._held(task, model, holding))
        self._changed()  # it counts from now on, and its own time to live may be over soon

    def _held(self, task: asyncio.Task[None], model: Model, holding: Holding) -> None:
        """A holding is over."""
        self._tasks.discard(task)
        del self.holdings[holding.id]
        holding.stopped.set()
        if model.holding is holding:
            model.holding = None
            model.since = self._now()
        self._changed()
