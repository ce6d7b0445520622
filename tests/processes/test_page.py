"""The page at /, as a browser asks for it."""

import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import router
from router.config.api_keys import ApiKey, digest
from router.config.settings import Settings
from router.registry.auth import Access
from tests.processes.upstreams import unasked, world

UI = Path(router.__file__).parent / "ui"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@asynccontextmanager
async def browsing(folder: Path, *keys: ApiKey) -> AsyncIterator[httpx.AsyncClient]:
    async with world(folder, unasked) as up, up.client() as client:
        up.registry.access = Access(keys, Settings())
        yield client


async def test_a_browser_gets_a_page_and_other_clients_get_json(tmp_path: Path) -> None:
    async with browsing(tmp_path) as client:
        page = await client.get("/", headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.text.startswith("<!doctype html>")
        for accept in ({}, {"Accept": "application/json"}):
            assert (await client.get("/", headers=accept)).json()["message"].startswith("the router is running")
        again = await client.get("/", headers={**BROWSER, "If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.skipif(shutil.which("node") is None, reason="the page is JavaScript, and node is not here")
@pytest.mark.parametrize(
    ("cache", "shown"),
    [
        (
            {"least": (256, 1), "granted": (1024, 4), "most": (4096, 16)},
            ["granted 1,024 tokens, 4 MiB", "least 256 tokens, 1 MiB", "most 4,096 tokens, 16 MiB"],
        ),
        ({"least": (256, 1), "granted": (256, 1), "most": (256, 1)}, ["granted 256 tokens, 1 MiB"]),
        ({"least": (256, 1), "granted": None, "most": (512, 2)}, ["least 256 tokens, 1 MiB", "most 512 tokens, 2 MiB"]),
        (None, []),
    ],
)
def test_the_page_shows_least_granted_and_most_of_the_kv_cache(cache: Any, shown: list[str]) -> None:
    sizes = cache and {name: size and {"tokens": size[0], "mib": size[1]} for name, size in cache.items()}
    [function] = re.findall(r"^function cacheOf.*?^}$", (UI / "page.js").read_text(), re.DOTALL | re.MULTILINE)
    program = (
        "const made = (tag, text) => ({ text, lines: [], append(line) { this.lines.push(line.text); } });"
        f"{function}; console.log(JSON.stringify(cacheOf({json.dumps({'kv_cache': sizes})}).lines));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == shown


async def test_the_page_is_made_of_what_this_server_has_and_of_nothing_else(tmp_path: Path) -> None:
    async with browsing(tmp_path, ApiKey(name="k", digest=digest("k"))) as client:
        page = await client.get("/", headers=BROWSER)
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        assert "unsafe" not in policy
        assert not re.search(r"<script>|<style|\son\w+=|style=|https?:", page.text), "the policy forbids them"
        parts = re.findall(r'(?:src|href)="(ui/[^"]*)"', page.text)
        assert parts == ["ui/page.css", "ui/page.js"]
        for part, type_ in zip(parts, ("text/css", "text/javascript"), strict=True):
            got = await client.get(f"/{part}")
            assert (got.status_code, got.headers["content-type"]) == (200, f"{type_}; charset=utf-8")
            assert not re.search(r"https?:|innerHTML|eval\(", got.text)
        assert (await client.get("/router/state")).status_code == 401, "what it shows needs a key all the same"
        wanted = set(re.findall(r'\$\("#([a-z]+)', (await client.get("/ui/page.js")).text))
        assert wanted
        assert wanted <= set(re.findall(r'id="([a-z]+)"', page.text))
