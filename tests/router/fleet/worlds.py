"""Small worlds for schedule tests: a real fleet and planner over a launcher without processes, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from router.config.presets import Preset
from router.config.settings import Settings
from router.events import Event, EventLog
from router.fleet.fleet import Fleet
from router.fleet.worker import Costs, Worker
from router.memory.checkpoint_facts import Checkpoint, Part, Tally, UnknownCheckpoint
from router.memory.learned import LearnedEstimates
from router.planner.ledger import DeviceId, Ledger
from router.store.converted import ConvertedSnapshots
from router.store.snapshots import Snapshots
from tests.fakes import CPU, GIB, FakeLauncher, FakeModel
from worker.protocol.argv import AdapterSource, Convert, Download

LLAMA = Checkpoint(
    identity="a llama", model_type="llama", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, value_dim=64,
    intermediate=512, vocab_size=1000, max_positions=1024, dtype="bfloat16",
    tensors={"bfloat16": Tally(64 << 20, 128 << 20)}, by_layer=(Part({"bfloat16": Tally(16 << 20, 32 << 20)}),) * 4,
    capabilities=("chat", "completion"),
)  # fmt: skip


class FakeFiles(Snapshots):
    """Snapshots of all models except those in `missing`."""

    def __init__(self, missing: tuple[str, ...] = ()):
        self.missing = set(missing)
        self.checkpoint = LLAMA  # of every snapshot without an entry in `facts_of`
        self.facts_of: dict[str, Checkpoint] = {}  # by model
        self.copies: dict[str, str] = {}  # folders of converted snapshots by the folder of the original
        self.convertible: set[str] = set()  # folders of snapshots that are converted after their download
        self.pickled: set[str] = set()  # those of them that cannot be loaded without a conversion
        self.damaged: set[str] = set()  # folders that cannot be read
        self.is_on_hub = False  # the models can be downloaded again
        self.conversions = ConvertedSnapshots(Path("/conversions of a fake"))
        self.looks = 0  # calls that looked up the size of weights
        self._changes: Counter[str] = Counter()

    def change(self, name: str) -> None:
        """Change the files of this model."""
        self._changes[name] += 1

    def fingerprint(self, preset: Preset) -> object:
        return preset.id in self.missing, self._changes[preset.id]

    def find(self, preset: Preset) -> str | None:
        return None if preset.id in self.missing else f"/snapshots/{preset.id}"

    def must_convert(self, preset: Preset, snapshot: str) -> bool:
        return snapshot in self.pickled and snapshot not in self.copies

    async def conversion(self, preset: Preset, snapshot: str) -> Convert | None:
        if snapshot not in self.convertible or snapshot in self.copies:
            return None
        return Convert(snapshot=snapshot, target=f"/converted/{preset.id}")

    def loads_from(self, preset: Preset, snapshot: str) -> str:
        return self.copies.get(snapshot, snapshot)

    def give_up_converted(self, snapshot: str) -> bool:
        sources = [source for source, made in self.copies.items() if made == snapshot]
        for source in sources:
            del self.copies[source]
        return bool(sources)

    def adapters(self, preset: Preset) -> list[AdapterSource]:
        return list(preset.adapters)

    def missing_adapters(self, preset: Preset) -> list[Download]:
        return []

    def missing_draft(self, preset: Preset) -> Download | None:
        return None

    def weights(self, snapshot: str) -> dict[str, int]:
        self.looks += 1
        return {f"{snapshot}/model.safetensors": 128 << 20}

    def fetched(self, preset: Preset, snapshot: str) -> None:
        self.missing.discard(preset.id)

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        await asyncio.sleep(0)
        if snapshot in self.damaged:
            raise UnknownCheckpoint(f"{snapshot} has no valid header")
        return self.facts_of.get(preset.id, self.checkpoint)

    def can_download_again(self, preset: Preset) -> bool:
        return self.is_on_hub

    def download(self, preset: Preset) -> Download:
        return Download(repo=preset.id)


class Schedule:
    """One fleet of models with stated sizes (bytes) on devices with stated totals."""

    made: ClassVar[list["Schedule"]] = []  # by the test that runs

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        totals: Mapping[DeviceId, int] | None = None,
        margin: int = 0,
        limit: Mapping[DeviceId, int] | None = None,
        settings: Settings | None = None,
        keys: Mapping[str, Mapping[str, Any]] | None = None,
        models: Mapping[str, FakeModel] | None = None,
        missing: tuple[str, ...] = (),
        stated: bool = True,
        launcher: FakeLauncher | None = None,
    ):
        keys = keys or {}
        self.launcher = launcher or FakeLauncher(
            totals or {CPU: 8 * GIB},
            {name: FakeModel(shards=(size,)) for name, size in sizes.items()} | dict(models or {}),
        )
        self.files = FakeFiles(missing)
        self.events = EventLog()
        settings = settings or Settings()
        self.presets = {
            name: Preset(id=name, path=f"/snapshots/{name}", **{**_required(size, stated=stated), **keys.get(name, {})})
            for name, size in sizes.items()
        }
        self.fleet = Fleet(
            launcher=self.launcher,
            learned_estimates=LearnedEstimates(Path("/nowhere/estimates.json"), submit=lambda save: None),  # in memory
            events=self.events,
            files=self.files,
            ledger=Ledger(margin=lambda _: margin, limit=dict(limit or {}).get, models_max=settings.workers_at_once),
            settings=settings,
            presets=self.presets,
        )
        self.launcher.on_reading = self.fleet.scheduler.plan_soon
        self.made.append(self)

    @property
    def journal(self) -> list[str]:
        return self.launcher.journal

    def entries(self, *kinds: str) -> list[str]:
        """Return the entries of the launcher's timeline that begin with one of `kinds`."""
        return [entry for _, entry in self.launcher.timeline if entry.startswith(kinds)]

    def events_of(self, kind: str) -> list[Event]:
        return [event for event in self.events.since(0) or () if event.kind == kind]

    def worker(self, name: str) -> Worker:
        """The oldest worker of a model."""
        return self.fleet.models[name].workers[0]

    def costs(self, name: str) -> Costs:
        costs = self.worker(name).costs
        assert costs is not None
        return costs

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def ask(self, model: str, seconds: float = 1.0) -> float:
        """Send a request that is answered for `seconds`; return the seconds that it waited before."""
        arrived = self.now
        with self.fleet.lease(model) as lease:
            await lease.ready()
            waited = self.now - arrived
            await asyncio.sleep(seconds)
        return waited

    async def asking(self, model: str, seconds: float = 1.0, *, wait: float) -> asyncio.Task[float]:
        """Send such a request in a task, and let `wait` seconds pass."""
        task = asyncio.create_task(self.ask(model, seconds))
        await asyncio.sleep(wait)
        return task

    async def refuses(self, model: str, error: type[Exception], *, match: str | None = None) -> None:
        """Send a request that ends with such an error."""
        import pytest  # scripts use this module, too

        with pytest.raises(error, match=match):
            await self.ask(model)

    async def stop(self) -> None:
        await self.fleet.close()
        assert self.launcher.over_commits == []
        assert self.launcher.running == {}


def _required(size: int, *, stated: bool) -> dict[str, Any]:
    return {"required_memory": {"": size}} if stated else {}
