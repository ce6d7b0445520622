"""The page at /, as a browser asks for it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from router.config.api_keys import ApiKey, digest
from router.config.settings import Settings
from router.registry.auth import Access
from tests.processes.upstreams import unasked, world

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
