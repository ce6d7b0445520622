"""Pulls: models that are downloaded from the hub, or deleted from its cache, while the router runs.

A pull is a worker that stops when the files are complete. It takes no device memory, and is listed and reports progress
like any other worker. If a request needs the model meanwhile, the same worker goes on and loads it. A pull that fails
keeps its partial files and its entry in the list until it is repeated or deleted.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from router.config.api_keys import ApiKey
from router.config.model_source import FoundModel
from router.config.presets import HUB, Preset, repository
from router.errors import ApiError, BadRequest, Duplicate, Internal, InUse, LoadBackoff, ModelNotFound, without_name
from router.events import Event
from router.fleet.worker import State, Worker
from router.registry.registry import Registry
from router.registry.shared_workers import ListedModel
from router.store import hub_cache
from router.store.catalogue import folder_of, hub_id

T = TypeVar("T")


class HubModels:
    """The pulls and deletions of one router."""

    def __init__(self, registry: Registry):
        self.registry = registry
        self._tasks: set[asyncio.Task[Any]] = set()
        # Number of calls that follow a pull which one of them began, by worker id. The last one to leave cancels it.
        self._followers: dict[int, int] = {}

    # Pulling

    async def fetch(self, text: str) -> None:
        """Begin to download `org/name[:revision]`. Returns when the hub has listed the files.

        The download goes on if the caller is cancelled. Raises BadRequest if the model exists or cannot be downloaded,
        LoadBackoff if a later try may succeed.
        """
        await asyncio.shield(self._begin(self._fetch(text)))

    async def _fetch(self, text: str, *, followed: bool = False) -> Worker | None:
        """As `fetch`, and return the worker that downloads; None if all files were in the cache and only the entry in
        the list was missing. `followed`: the caller follows the download, also before the hub has listed the files."""
        registry = self.registry
        id, found = self._find_on_hub(text)
        is_new = id not in registry.overrides.fetched or id not in registry.shared_workers.listed
        if is_new:
            try:
                await registry.add(id, found=found)
            except Duplicate:
                raise BadRequest(f"model '{id}' already exists", param="model") from None
        listed = registry.shared_workers.find(id)
        model = listed.model
        if any(not worker.retired for worker in model.workers):
            raise BadRequest(f"model '{id}' already exists: it is being fetched", param="model")
        if registry.files.find(listed.preset) is not None:
            if not is_new:
                raise BadRequest(f"model '{id}' already exists", param="model")
            registry.events.append("listed", id)
            return None
        worker = registry.fleet.fetch(model.preset.id)
        if followed:
            self._followers[worker.id] = 1
        async for event in self.follow(worker):
            if event.kind == "progress":  # the hub has listed the files
                return worker
        try:
            self.check(worker)
        except ApiError:
            self._followers.pop(worker.id, None)
            # The pull failed at once: remove the entry, unless a reload or another call has replaced the model.
            if is_new and (now := registry.shared_workers.listed.get(id)) is not None and now.model is model:
                registry.remove(id, "requested")
            raise
        return worker

    def _find_on_hub(self, text: str) -> tuple[str, FoundModel]:
        """The id and the repository of a model name. Raises BadRequest if it cannot be pulled."""
        try:
            repo, revision = repository(text)
        except ValueError as error:
            raise BadRequest(str(error), param="model") from None
        settings = self.registry.settings
        if settings.offline:
            raise BadRequest(f"{text} cannot be fetched: the router was started with --offline", param="model")
        if settings.models_cache is False:
            raise BadRequest(
                f"{text} would not be listed: the router was started with --no-models-cache; name it in a preset",
                param="model",
            )
        id = hub_id(repo, revision)
        return id, FoundModel(id, "cache", repo=repo, revision=revision)

    async def follow(self, worker: Worker) -> AsyncIterator[Event]:
        """The events of a download until it ends."""
        mark = self.registry.events.last_id
        if worker.state is not State.DOWNLOADING:
            return
        async for event in self.registry.events.follow(mark):
            if worker.state is not State.DOWNLOADING:
                return
            if event.model == worker.preset.id and event.data.get("worker") == worker.id:
                yield event

    @staticmethod
    def check(worker: Worker) -> None:
        """Raise the error of an ended download; return if its files are complete."""
        if worker.snapshot:
            return
        id, lost = worker.preset.id, worker.lost
        if lost is None:
            raise LoadBackoff(f"the download of '{id}' was cancelled; repeat the request to resume it", retry_after=1)
        why = without_name(id, lost.message)
        if lost.final:
            raise BadRequest(f"model '{id}' cannot be fetched: {why}", param="model")
        raise LoadBackoff(f"model '{id}' cannot be fetched now: {why}", retry_after=5)

    async def pull(self, key: ApiKey, name: str) -> Worker | None:
        """Like `fetch`, but a model may also be listed, complete, or downloading. The caller must use `following`.

        Raises BadRequest, LoadBackoff.
        """
        try:
            listed = self.registry.model(key, name)
        except ModelNotFound:
            fetching = self._begin(self._fetch(name, followed=True))
            try:
                worker = await asyncio.shield(fetching)
            except asyncio.CancelledError:  # the client has closed the connection before the hub has listed the files
                fetching.add_done_callback(self._leave_fetched)
                raise
            except BadRequest as error:
                try:
                    listed = self.registry.model(key, name)  # another call has added it meanwhile
                except ModelNotFound:
                    raise error from None
            else:
                return worker
        worker = listed.model.open
        if worker is not None and worker.state is State.DOWNLOADING:
            if worker.id in self._followers:
                self._followers[worker.id] += 1
            return worker
        if worker is not None or self.registry.files.find(listed.preset) is not None:
            return None
        self.registry.files.download(listed.preset)  # raises if the model cannot be downloaded
        worker = self.registry.fleet.fetch(listed.model.preset.id)
        self._followers[worker.id] = 1
        return worker

    @contextmanager
    def following(self, worker: Worker | None) -> Iterator[None]:
        """Keep the download of a `pull` running during the block.

        Clients of Ollama cancel a pull by closing the connection. So a download that such a call began is cancelled at
        the end of the last block. Its partial files stay for the next try.
        """
        try:
            yield
        finally:
            if worker is not None:
                self._leave(worker)

    def _leave_fetched(self, fetching: "asyncio.Task[Worker | None]") -> None:
        if fetching.exception() is None and (worker := fetching.result()):
            self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        """Cancel a download when the last call leaves it, unless a request waits for the model."""
        if worker.id not in self._followers:
            return
        self._followers[worker.id] -= 1
        if not self._followers[worker.id]:
            del self._followers[worker.id]
            if worker.state is State.DOWNLOADING and not worker.leases:
                self.registry.fleet.retire(worker, "requested", drain=0.0)

    # Deleting

    async def delete(self, key: ApiKey, name: str) -> None:
        """Stop a model, or cancel its download, and delete its files from the cache.

        Returns when they are deleted. Running requests have the drain time to finish. The deletion goes on if the
        caller is cancelled. Raises ModelNotFound, BadRequest for a model of another source, InUse if a preset needs the
        files.
        """
        listed = self.registry.whole_model(key, name)
        if listed.preset.source != "cache":
            where = "a preset" if listed.preset.source == "preset" else "--models-dir"
            raise BadRequest(
                f"model '{listed.id}' comes from {where}: only downloaded models can be deleted; remove it there",
                param="model",
            )
        if found := await presets_using_files(self.registry, listed.preset):
            raise InUse(f"the files of '{listed.id}' are used by {', '.join(found)}; change that preset first")
        await asyncio.shield(self._begin(self._delete(listed)))

    async def _delete(self, listed: ListedModel) -> None:
        registry, preset = self.registry, listed.preset
        if (now := registry.shared_workers.listed.get(preset.id)) is None or now.model is not listed.model:
            raise ModelNotFound(f"model '{preset.id}' was removed meanwhile", param="model")
        # A reload during the deletion must not list the model again while some of its files are left.
        registry.deleting.add(preset.id)
        try:
            for worker in registry.remove(preset.id, "requested"):
                await worker.stopped.wait()
            # Other revisions of the repository share its blobs, so the snapshots that they use are kept.
            others = [
                other.preset for other in registry.shared_workers.listed.values() if other.preset.repo == preset.repo
            ]
            keep = {Path(folder).name for other in others if (folder := registry.files.find(other)) is not None}
            cache, repo, revision = registry.settings.hub_cache, preset.repo, preset.revision
            await asyncio.to_thread(hub_cache.remove, cache, repo, revision, keep=keep, alone=not others)
            await asyncio.to_thread(registry.files.conversions.sweep)
        except (OSError, ValueError) as error:
            registry.deleting.discard(preset.id)
            with suppress(ApiError):
                await registry.reload()  # lists the model again if its snapshot is still there
            raise Internal(f"the files of '{preset.id}' cannot be deleted: {error}") from None
        finally:
            registry.deleting.discard(preset.id)

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the error as retrieved
        return task


async def presets_using_files(registry: Registry, preset: Preset) -> list[str]:
    """The ids of models from presets or folders that need the files of a cached model."""
    others = [listed.preset for listed in registry.shared_workers.listed.values() if listed.preset.source != "cache"]
    near = [
        other
        for other in others
        if other.path or other.tokenizer or other.model_draft or other.adapters or other.repo == preset.repo
    ]
    return await asyncio.to_thread(_presets_using_files, registry, preset, near) if near else []


def _presets_using_files(registry: Registry, preset: Preset, others: Sequence[Preset]) -> list[str]:
    folder = folder_of(registry.settings.hub_cache, preset.repo).resolve()
    ours = registry.files.find(preset)

    def needs(other: Preset) -> bool:
        if other.repo == preset.repo and other.revision == preset.revision:
            return True
        further = (other.model_draft, *(adapter.path for adapter in other.adapters))
        if any(name.startswith(f"{HUB}{preset.repo}:") for name in further):
            return True
        paths = [Path(name).resolve() for name in (other.path, other.tokenizer, *further) if name]
        return any(folder in path.parents for path in paths) or (
            other.repo == preset.repo and ours is not None and registry.files.find(other) == ours
        )

    return [other.id for other in others if needs(other)]
