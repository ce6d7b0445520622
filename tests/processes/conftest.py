"""Routers that all tests of one pytest process share. A test gives one its own models with `Router.serve`. A journal of
fake workers is a test's own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import Journal
from tests.processes.hubs import Hub, running_hub
from tests.processes.routers import SECRET, Router, shared_router


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router for fake models: 1000 MiB, and pages of one other origin."""
    limits = ("--device-limit", "cpu=1064", "--models-memory-margin", "64")
    async with shared_router(tmp_path_factory.mktemp("up"), *limits, "--cors-origins", "https://ui.example") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router with room for one fake model, which another one replaces at once."""
    limits = ("--models-max", "1", "--swap-patience", "0", "--models-memory-margin", "64")
    async with shared_router(tmp_path_factory.mktemp("one"), *limits) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    async with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def real(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router for real models, which may come from `hub`. Its workers are forked: the libraries of models are imported
    once."""
    folder = tmp_path_factory.mktemp("real")
    environ = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(folder / "cache"), "HF_TOKEN": SECRET}
    registrations = ("--registration-dirs", str(tmp_path_factory.getbasetemp()))
    async with shared_router(folder, "--fork-server", *registrations, environ=environ) as running:
        await running.says("is warm")
        yield running


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    with Journal(tmp_path / "journal") as found:
        yield found
