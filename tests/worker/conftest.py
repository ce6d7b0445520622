"""Snapshots that no test changes."""

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))
