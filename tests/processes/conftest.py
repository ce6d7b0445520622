"""Routers that all tests of one pytest process share. A test gives one its own models with `Router.serve`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.processes.routers import Router, shared_router


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router for fake models: 1000 MiB, and pages of one other origin."""
    limits = ("--device-limit", "cpu=1064", "--models-memory-margin", "64")
    async with shared_router(tmp_path_factory.mktemp("up"), *limits, "--cors-origins", "https://ui.example") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router for real models. Its workers are forked: the libraries of models are imported once."""
    async with shared_router(tmp_path_factory.mktemp("real"), "--fork-server", "--ctx-size", "256") as running:
        await running.says("is warm")
        yield running
