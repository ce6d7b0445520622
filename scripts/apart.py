"""Objects in a process of their own, called from this one.

A measurement of several models in turns needs this. OpenMP's threads wait by spinning, and start the next product at
once, only while a process has no more of them than cores. Two models in one process have twice as many.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any


class Apart:
    """`make` creates objects by name. It must be picklable, and so must all arguments and results."""

    def __init__(self, make: Callable[[], dict[str, Any]]):
        """Raises RuntimeError with the cause."""
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.names: list[str] = self._answer()

    def call(self, name: str, method: str, *given: Any) -> Any:
        """Raises RuntimeError with the exception raised there, or if that process has exited."""
        self._link.send((name, method, given))
        return self._answer()

    def close(self) -> None:
        """Return once the process has ended."""
        self._link.close()
        self._process.join(15)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            found, error = self._link.recv()
        except (EOFError, OSError):
            self._process.join(15)
            raise RuntimeError(f"its process ended with exit code {self._process.exitcode}") from None
        if error:
            raise RuntimeError(error)
        return found


def _serve(make: Callable[[], dict[str, Any]], link: Connection) -> None:
    """Loop of that process, until the other side closes."""
    try:
        with ThreadPoolExecutor(1) as loading:  # OpenMP's threads for it end with it.
            objects = loading.submit(make).result()
    except Exception as error:  # noqa: BLE001  the caller says it
        traceback.print_exception(error)
        link.send((None, f"{type(error).__name__}: {error}"))
        return
    link.send((list(objects), ""))
    while True:
        try:
            name, method, given = link.recv()
        except EOFError:
            break
        try:
            link.send((getattr(objects[name], method)(*given), ""))
        except Exception as error:  # noqa: BLE001  likewise
            link.send((None, f"{type(error).__name__}: {error}"))
    for each in objects.values():
        if hasattr(each, "close"):
            each.close()
