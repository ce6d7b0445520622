"""Calls about this server: its web page, its version, its OpenAPI document, and routes that it does not offer."""

import asyncio
import hashlib
from functools import cache
from pathlib import Path

import orjson
from aiohttp import web

from router import __version__
from router.api.call import ApiCall, ApiResult
from router.api.openapi import document
from router.errors import Forbidden, NotOffered

PAGE_FOLDER = Path(__file__).parents[1] / "ui"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
# The page loads and calls nothing but this server.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


async def index(call: ApiCall) -> ApiResult:
    """GET /: the web page for browsers; a JSON object with the address of the API for other clients."""
    if "text/html" in call.request.headers.get("Accept", ""):
        return _page_file(call, "page.html")
    at = f"{call.registry.settings.api_prefix}/v1"
    return {"message": f"the router is running; its API is at {at}", "version": __version__}


async def page_file(call: ApiCall) -> ApiResult:
    """GET /ui/...: a file of the web page."""
    return _page_file(call, call.route.path.rpartition("/")[2])


async def version(call: ApiCall) -> ApiResult:
    """GET /version."""
    return {"version": __version__}


async def openapi(call: ApiCall) -> ApiResult:
    """GET /openapi.json."""
    settings = call.registry.settings
    text = await asyncio.to_thread(_document, settings.api_prefix, settings.lmi_management)
    return web.Response(body=text, content_type="application/json", charset="utf-8")


async def disabled(call: ApiCall) -> ApiResult:
    """Raises Forbidden."""
    raise Forbidden(
        f"{call.request.path} is disabled: this server neither fetches URLs nor runs tools", reason="feature_disabled"
    )


async def not_offered(call: ApiCall) -> ApiResult:
    """Raises NotOffered with the route's advice."""
    route = call.route
    raise NotOffered(f"{route.method} {route.path} is not offered; use {route.instead}")


@cache
def _document(prefix: str, lmi_management: bool) -> bytes:
    return orjson.dumps(document(prefix=prefix, lmi_management=lmi_management))


@cache
def _read_page_file(name: str) -> tuple[bytes, dict[str, str]]:
    """A file of the web page and its response headers."""
    body = (PAGE_FOLDER / name).read_bytes()
    return body, {
        "Content-Type": MEDIA_TYPES[Path(name).suffix],
        "Content-Security-Policy": SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Vary": "Accept",
    }


def _page_file(call: ApiCall, name: str) -> web.Response:
    """The file, or status 304 if the browser has the current version."""
    body, headers = _read_page_file(name)
    if call.request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers={name: headers[name] for name in ("ETag", "Cache-Control", "Vary")})
    return web.Response(body=body, headers=headers)
