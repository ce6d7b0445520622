"""Models that come from the hub while the router runs, and that leave its cache again.

A download is a worker's life that ends with the files: it takes no memory and no place, is listed and followed like
any other, and goes on to a load if somebody asks for the model meanwhile. One that breaks off keeps its partial files,
and its place in the list, until it is asked for again or deleted.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from router.config.presets import Preset, repository
from router.config.resolve import Found
from router.config.settings import Key
from router.errors import (
    ApiError,
    BadRequest,
    Duplicate,
    Internal,
    InUse,
    LoadBackoff,
    ModelNotFound,
)  # fmt: skip
from router.events import Event
from router.fleet.worker import State, Worker
from router.registry.registry import Site
from router.registry.shared_workers import Listed
from router.store import hub_cache
from router.store.catalogue import hub_id

T = TypeVar("T")


class Hub:
    """What one router fetches and deletes."""

    def __init__(self, site: Site):
        self.site = site
        self._tasks: set[asyncio.Task[Any]] = set()
        self._followers: dict[int, int] = {}
        """How many calls want a download that one of them began, by its worker: the last to leave ends it."""

    # Fetching

    async def fetch(self, text: str) -> tuple[str, Worker | None]:
        """Begin to fetch `org/name[:revision]`; returns its id and the download, once the hub has said what there is.

        None: all files are here already, and only were not listed. What is begun goes on if the caller leaves. Raises
        BadRequest for what cannot be fetched or exists, LoadBackoff if the hub or the disk may do better later.
        """
        return await self._to_its_end(self._fetch(text))

    async def _fetch(self, text: str) -> tuple[str, Worker | None]:
        site = self.site
        id, found = self._meant(text)
        is_new = id not in site.fetched or id not in site.members.listed
        if is_new:
            try:
                await site.add(id, found=found)
            except Duplicate:
                raise BadRequest(f"model '{id}' already exists", param="model") from None
        listed = site.members.find(id)
        model = listed.model
        if any(not worker.retired.is_set() for worker in model.workers):
            raise BadRequest(f"model '{id}' already exists: it is being fetched", param="model")
        if site.files.find(listed.preset) is not None:
            if not is_new:
                raise BadRequest(f"model '{id}' already exists", param="model")
            site.events.append("listed", id)
            return id, None
        worker = site.fleet.fetch(model.preset.id)
        async for event in self.follow(worker):
            if event.kind == "progress":
                return id, worker
        try:
            self.check(worker)
        except ApiError:
            if is_new and (now := site.members.listed.get(id)) is not None and now.model is model:
                site.remove(id, "requested")
            raise
        return id, worker

    def _meant(self, text: str) -> tuple[str, Found]:
        """What a name means on the hub. Raises BadRequest if nothing can be fetched, or not by that name."""
        try:
            repo, revision = repository(text)
        except ValueError as error:
            raise BadRequest(str(error), param="model") from None
        settings = self.site.settings
        if settings.offline:
            raise BadRequest(f"{text} cannot be fetched: the router was started with --offline", param="model")
        if not settings.models_cache:
            raise BadRequest(
                f"{text} would not be listed: the router was started with --no-models-cache; name it in a preset",
                param="model",
            )
        id = hub_id(repo, revision)
        return id, Found(id, "cache", repo=repo, revision=revision)

    async def follow(self, worker: Worker) -> AsyncIterator[Event]:
        """What happens to a download, as it comes, until it is over."""
        mark = self.site.events.last_id
        if worker.state is not State.DOWNLOADING:
            return
        async for event in self.site.events.follow(mark):
            if worker.state is not State.DOWNLOADING:
                return
            if event.model == worker.preset.id and event.data.get("worker") == worker.id:
                yield event

    @staticmethod
    def check(worker: Worker) -> None:
        """Raises why a download that is over has not brought the files."""
        if worker.snapshot:
            return
        id, lost = worker.preset.id, worker.lost
        if lost is None:
            raise LoadBackoff(f"the download of '{id}' was cancelled; ask for it again to go on", retry_after=1)
        if lost.final:
            raise BadRequest(f"model '{id}' cannot be fetched: {lost.message}", param="model")
        raise LoadBackoff(f"model '{id}' cannot be fetched now: {lost.message}", retry_after=5)

    async def pull(self, key: Key, name: str) -> "Pull":
        """Like `fetch`, of a model that may be listed, here, or coming already. Raises BadRequest, LoadBackoff."""
        try:
            listed = self.site.model(key, name)
        except ModelNotFound:
            _, worker = await self.fetch(name)
            return Pull(worker, began=True)
        worker = listed.model.open
        if worker is not None and worker.state is State.DOWNLOADING:
            return Pull(worker, began=False)
        if worker is not None or self.site.files.find(listed.preset) is not None:
            return Pull(None, began=False)
        self.site.files.download(listed.preset)  # may be forbidden
        return Pull(self.site.fleet.fetch(listed.model.preset.id), began=True)

    @contextmanager
    def wanted(self, pull: "Pull") -> Iterator[None]:
        """Follow a download for the length of the block; of one that calls like this began the last to leave ends it.

        What has come by then stays for the next try.
        """
        worker = pull.worker
        if worker is None:
            yield
            return
        if pull.began or worker.id in self._followers:
            self._followers[worker.id] = self._followers.get(worker.id, 0) + 1
        try:
            yield
        finally:
            if worker.id in self._followers:
                self._followers[worker.id] -= 1
                if not self._followers[worker.id]:
                    del self._followers[worker.id]
                    if worker.state is State.DOWNLOADING and not worker.leases:
                        self.site.fleet.retire(worker, "requested", drain=0.0)

    # Deleting

    async def delete(self, key: Key, name: str) -> None:
        """Stop a model and delete its files from the cache, or cancel its download and delete what has come of it.

        Returns once they are gone; running requests get the time of a drain first. What is begun goes on if the caller
        leaves. Raises ModelNotFound, BadRequest for a model of another source, InUse if a preset needs the files.
        """
        listed = self.site.model(key, name)
        if listed.preset.source != "cache":
            where = "a preset" if listed.preset.source == "preset" else "--models-dir"
            raise BadRequest(
                f"model '{listed.id}' comes from {where}: only downloaded ones can be deleted; take it out there",
                param="model",
            )
        if found := await users(self.site, listed.preset):
            raise InUse(f"the files of '{listed.id}' are used by {', '.join(found)}; change that preset first")
        await self._to_its_end(self._delete(listed))

    async def _delete(self, listed: Listed) -> None:
        site, preset = self.site, listed.preset
        if (now := site.members.listed.get(preset.id)) is None or now.model is not listed.model:
            raise ModelNotFound(f"model '{preset.id}' is gone already", param="model")
        site.leaving.add(preset.id)
        try:
            for worker in site.remove(preset.id, "requested"):
                await worker.stopped.wait()
            others = [other.preset for other in site.members.listed.values() if other.preset.repo == preset.repo]
            keep = {Path(folder).name for other in others if (folder := site.files.find(other)) is not None}
            cache, repo, revision = site.settings.hub_cache, preset.repo, preset.revision
            await asyncio.to_thread(hub_cache.remove, cache, repo, revision, keep=keep, alone=not others)
            await asyncio.to_thread(site.files.sweep)
        except (OSError, ValueError) as error:
            site.leaving.discard(preset.id)
            with suppress(ApiError):
                await site.reload()  # what is still there is listed again
            raise Internal(f"the files of '{preset.id}' cannot be deleted: {error}") from None
        finally:
            site.leaving.discard(preset.id)

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)


@dataclass(frozen=True, slots=True)
class Pull:
    """What somebody waits for: a download, or nothing, as the files are here; and whether this call began it."""

    worker: Worker | None
    began: bool


async def users(site: Site, preset: Preset) -> list[str]:
    """Models of other sources that need the files of this one, which is of the cache."""
    others = [each.preset for each in site.members.listed.values() if each.preset.source != "cache"]
    near = [other for other in others if other.path or other.tokenizer or other.repo == preset.repo]
    return await asyncio.to_thread(_users, site, preset, near) if near else []


def _users(site: Site, preset: Preset, others: Sequence[Preset]) -> list[str]:
    folder = hub_cache.folder_of(site.settings.hub_cache, preset.repo).resolve()
    ours = site.files.find(preset)

    def needs(other: Preset) -> bool:
        if other.repo == preset.repo and other.revision == preset.revision:
            return True
        paths = [Path(name).resolve() for name in (other.path, other.tokenizer) if name]
        return any(folder in path.parents for path in paths) or (
            other.repo == preset.repo and ours is not None and site.files.find(other) == ours
        )

    return [other.id for other in others if needs(other)]


__all__ = ["Hub", "users"]
