"""What LMI's API says without tokens: whether this server is well."""

from typing import Any

from router.site import Site


def ping(site: Site) -> tuple[int, dict[str, Any]]:
    """(status, body) of GET /ping: well, or still loading; 500 while a model of `load-on-startup` is failed."""
    for id in sorted(site.awaited):
        model = site.fleet.models.get(id)
        if model is not None and model.failure is not None:
            told = "a model of load-on-startup has failed; GET /models says which and why"  # to anybody, so no more
            return 500, {"code": 500, "type": "InternalServerException", "message": told}
    return 200, {"status": "pending" if site.awaited else "healthy"}


__all__ = ["ping"]
