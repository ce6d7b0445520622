"""The client commands: one GET to a running router, and its answer as a table."""

import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from router.cli.options import URL

TIMEOUT = 10.0
_HEAD = ("NAME", "STATE", "DEVICE", "EST/MEAS MiB", "KV TOKENS", "KV MiB", "ACTIVE", "QUEUE", "LOAD", "STAGES")


class RouterUnreachable(Exception):
    """No router answered, or the answer is not a router's. The message names the remedy."""


def models(url: str, key: str = "") -> list[dict[str, Any]]:
    """The models of the router at `url`. Raises RouterUnreachable."""
    answer = get(url, "/v1/models", key)  # with --lmi-management, /models is LMI's list
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(map(_is_ours, rows)):
        raise RouterUnreachable(f"what answers at {url} is not this kind of router; give --url, or set ROUTER_URL")
    return rows


def _is_ours(row: Any) -> bool:
    """True if a row of the model list has the state of our workers."""
    status = row.get("status") if isinstance(row, dict) else None
    return isinstance(status, dict) and {"value", "in_flight"} <= status.keys()


def connect(url: str, key: str = "") -> httpx.Client:
    """An HTTP client of the router at `url`, which may be the path of a socket file as in `--host`. It ignores proxies
    of the environment, and trusts the certificates that this machine trusts (SSL_CERT_FILE)."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = None
    if url.endswith(".sock") and "://" not in url:
        transport, url = httpx.HTTPTransport(uds=url), "http://router"  # the host has no meaning
    verify = ssl.create_default_context()
    return httpx.Client(
        base_url=url, transport=transport, headers=headers, timeout=TIMEOUT, trust_env=False, verify=verify
    )


def get(url: str, path: str, key: str = "") -> Any:
    """The JSON answer of the router at `url`, which may be a socket file. Raises RouterUnreachable."""
    try:
        with connect(url, key) as http:
            return http.get(path, follow_redirects=True).raise_for_status().json()
    except httpx.HTTPStatusError as refused:
        status = refused.response.status_code
        hint = "; give --api-key, or set ROUTER_API_KEY" if status in (401, 403) else ""
        raise RouterUnreachable(f"{url} answered {status}{hint}") from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        example = f"{URL} or a path that ends in .sock"
        raise RouterUnreachable(f"{url} is no address such as {example}; give --url, or set ROUTER_URL") from None
    except (httpx.HTTPError, ValueError) as failed:
        raise RouterUnreachable(f"no router answers at {url} ({failed}); give --url, or set ROUTER_URL") from None


def processes(models: Sequence[Mapping[str, Any]], *, now: float, everything: bool = False) -> str:
    """The lines of `router ps`: models that are loaded or failed, and with `everything` all models. The reasons of
    failed models follow. `now` is in seconds since 1970."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for model in models:
        status = model["status"]
        if everything or status["value"] != "unloaded" or "error" in status:
            rows.append(_row(model["id"], status))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_failure_line(model["id"], model["status"], now) for model in models if "error" in model["status"]]
    return "\n".join(lines)


def _failure_line(id: str, status: Mapping[str, Any], now: float) -> str:
    """The reason why a model failed, and the time of its next attempt."""
    left, why = status["retry_at"] - now, " ".join(status["error"].split()).removeprefix(f"{id}: ")
    return f"{id}: {why} (next attempt {f'in {left:.0f} s' if left > 0 else 'with its next request'})"


def _row(id: str, status: Mapping[str, Any]) -> tuple[str, ...]:
    memory: Mapping[str, Mapping[str, int | None]] = status.get("memory", {})
    sizes = [f"{device['estimated_mib']}/{_or_dash(device['measured_mib'])}" for device in memory.values()]
    spent: Mapping[str, float] = status.get("spent", {})
    load = sum(seconds for stage, seconds in spent.items() if stage not in ("early_start", "first_token"))
    return (
        id,
        ("failed" if status.get("failed") else status["value"]) + (" (draining)" if status.get("draining") else ""),
        ",".join(memory) or next((f"with {other}" for other in status.get("shares", ())), "-"),
        ",".join(sizes) or "-",
        _cache(status, "tokens"),
        _cache(status, "mib"),
        str(status.get("in_flight", 0)),
        str(status.get("queued", 0)),
        f"{load:.2f} s" if spent else "-",
        " ".join(f"{stage} {seconds:.2f}" for stage, seconds in spent.items() if seconds >= 0.005) or "-",
    )


def _cache(status: Mapping[str, Any], unit: str) -> str:
    """The granted KV cache in `unit`, and the least and the most if it has a range: `8192 (2048..65536)`."""
    if (cache := status.get("kv_cache")) is None:
        return "-"
    granted = _or_dash(cache["granted"] and cache["granted"][unit])
    least, most = cache["least"][unit], cache["most"][unit]
    return granted if cache["least"]["tokens"] == cache["most"]["tokens"] else f"{granted} ({least}..{most})"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
