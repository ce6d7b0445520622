"""Calls about this server: its page, its version, its OpenAPI document, and paths that it does not offer."""

import asyncio
from functools import cache

import orjson
from aiohttp import web

from router import __version__
from router.api import static_page
from router.api.call import ApiCall, Result
from router.api.openapi import document
from router.errors import Forbidden, NotOffered


async def index(call: ApiCall) -> Result:
    """GET /: the page for browsers, else where the API is."""
    if static_page.wants(call.request.headers.get("Accept", "")):
        return _page_file(call, "page.html")
    at = f"{call.site.settings.api_prefix}/v1"
    return {"message": f"the router is running; its API is at {at}", "version": __version__}


async def page_file(call: ApiCall) -> Result:
    """GET /ui/...: a file of the page."""
    return _page_file(call, call.route.path.rpartition("/")[2])


async def version(call: ApiCall) -> Result:
    """GET /version."""
    return {"version": __version__}


async def openapi(call: ApiCall) -> Result:
    """GET /openapi.json."""
    text = await asyncio.to_thread(_document, call.site.settings.api_prefix)
    return web.Response(body=text, content_type="application/json", charset="utf-8")


async def disabled(call: ApiCall) -> Result:
    """Raises Forbidden."""
    raise Forbidden(f"{call.request.path} is disabled: this server fetches and runs nothing", reason="feature_disabled")


async def not_offered(call: ApiCall) -> Result:
    """Raises NotOffered with the route's advice."""
    route = call.route
    raise NotOffered(f"{route.method} {route.path} is not offered; use {route.instead}")


@cache
def _document(prefix: str) -> bytes:
    return orjson.dumps(document(prefix=prefix))


def _page_file(call: ApiCall, name: str) -> web.Response:
    """The file, or status 304 if the browser has it already."""
    sheet = static_page.sheet(name)
    if call.request.headers.get("If-None-Match") == sheet.tag:
        kept = ("ETag", "Cache-Control", "Vary")
        return web.Response(status=304, headers={name: sheet.headers[name] for name in kept})
    return web.Response(body=sheet.body, headers=sheet.headers)


__all__ = ["disabled", "index", "not_offered", "openapi", "page_file", "version"]
