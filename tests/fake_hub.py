"""A small hub as a real program: a folder tree served as model repositories, with faults on demand.

    python tests/fake_hub.py ROOT        serves ROOT/ORG/NAME/... as repository ORG/NAME, branch `main`

The name without `org/` is redirected to org/NAME, as the real hub redirects gpt2 to openai-community/gpt2.

The first line of stdout is its URL. A commit is a hash of a repository's content, so changing a file moves `main`.
Endpoints are those that huggingface_hub 2.4 needs: model info, tree, and HEAD and GET of files with ranges. Files of
1 KiB and more, and all safetensors files, are LFS files (listed with their SHA-256), others git blobs.

`PUT /_faults` with a JSON object (path below ROOT, or ORG/NAME for the listing, to a fault) says what goes wrong:
    {"status": 503}              answer with that status; "code" becomes X-Error-Code (GatedRepo, RepoNotFound, ...)
    {"token": "t"}               401 without that bearer token
    {"drop": n}                  close the connection after n bytes of the body
    {"stall": n}                 send nothing more after n bytes of the body until the faults change, then close
    {"ranges": false}            answer a range with the whole file
    {"short": n}                 serve only n bytes and state that size
    {"flip": n}                  invert byte n
    {"redirect": url}            302 to the same path at another hub
    {"size": n}                  list the file with that size
A list of faults happens one by one, each to one request. `GET /_journal` tells the requests so far, one
`METHOD path range` a line, with ` token` where one was sent.
"""

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

REPOSITORY = "{org:[^/_][^/]*}/{name:[^/]+}"


class Hub:
    def __init__(self, root: Path):
        self._root = root
        self._faults: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}
        self._change = asyncio.Event()  # set when the faults change
        self._journal: list[str] = []

    def app(self) -> web.Application:
        @web.middleware
        async def journal(request: web.Request, handler: Any) -> web.StreamResponse:
            if not request.path.startswith("/_"):
                words = [request.method, request.path, request.headers.get("Range", "")]
                words += ["token"] if "Authorization" in request.headers else []
                self._journal.append(" ".join(word for word in words if word))
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[journal])
        app.router.add_put("/_faults", self._set_faults)
        app.router.add_get("/_journal", self._tell)
        app.router.add_get(f"/api/models/{REPOSITORY}/revision/{{revision}}", self._info)
        app.router.add_get(f"/api/models/{REPOSITORY}/tree/{{revision}}", self._tree)
        app.router.add_route("*", f"/{REPOSITORY}/resolve/{{revision}}/{{path:.+}}", self._file)
        app.router.add_get("/api/models/{name}/revision/{revision}", self._redirect)
        app.router.add_route("*", "/{name}/resolve/{revision}/{path:.+}", self._redirect)
        return app

    async def _set_faults(self, request: web.Request) -> web.Response:
        self._faults = await request.json()
        self._change.set()
        self._change = asyncio.Event()
        return web.Response()

    async def _tell(self, request: web.Request) -> web.Response:
        return web.Response(text="\n".join(self._journal))

    def _fault(self, name: str) -> Mapping[str, Any]:
        fault = self._faults.get(name, {})
        if isinstance(fault, list):
            fault = fault.pop(0) if fault else {}
        return fault

    async def _redirect(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        raise web.HTTPTemporaryRedirect(request.path_qs.replace(f"/{name}/", f"/org/{name}/", 1))

    async def _info(self, request: web.Request) -> web.Response:
        folder, commit = self._repository(request)
        siblings = [
            {"rfilename": path, "size": facts["size"], "blobId": facts["oid"]}
            | ({"lfs": {"sha256": facts["lfs"]["oid"], **_sizes(facts)}} if "lfs" in facts else {})
            for path, facts in self._listing(folder).items()
        ]
        name = f"{folder.parent.name}/{folder.name}"
        return web.json_response({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        folder, _ = self._repository(request)
        return web.json_response(
            [{"type": "file", "path": path, **facts} for path, facts in self._listing(folder).items()]
        )

    async def _file(self, request: web.Request) -> web.StreamResponse:
        folder, commit = self._repository(request, may_fail=False)
        path = request.match_info["path"]
        fault = self._fault(f"{folder.parent.name}/{folder.name}/{path}")
        _refuse(fault, request)
        if "redirect" in fault:
            raise web.HTTPFound(fault["redirect"] + request.path, headers={"X-Repo-Commit": commit})
        if not (folder / path).is_file():
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = bytearray((folder / path).read_bytes())
        facts = _facts(path, bytes(content))
        if "flip" in fault:
            content[fault["flip"]] ^= 0xFF
        headers = {"X-Repo-Commit": commit, "ETag": f'"{facts.get("lfs", facts)["oid"]}"', "Accept-Ranges": "bytes"}
        return await _send(request, bytes(content[: fault.get("short")]), headers, fault, self._change)

    def _repository(self, request: web.Request, *, may_fail: bool = True) -> tuple[Path, str]:
        name = f"{request.match_info['org']}/{request.match_info['name']}"
        if may_fail:
            _refuse(self._fault(name), request)
        folder = self._root / name
        if not folder.is_dir():
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        commit = hashlib.sha1(repr(self._listing(folder, true_sizes=True)).encode()).hexdigest()
        if request.match_info["revision"] not in ("main", commit):
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return folder, commit

    def _listing(self, folder: Path, *, true_sizes: bool = False) -> dict[str, dict[str, Any]]:
        listing = {}
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            path = file.relative_to(folder).as_posix()
            facts = _facts(path, file.read_bytes())
            fault = self._faults.get(f"{folder.parent.name}/{folder.name}/{path}", {})
            lie = {"size": fault["size"]} if isinstance(fault, dict) and "size" in fault and not true_sizes else {}
            listing[path] = {**facts, **lie}
        return listing


def _facts(path: str, content: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if len(content) >= 1024 or path.endswith(".safetensors"):
        facts["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return facts


def _sizes(facts: Mapping[str, Any]) -> dict[str, int]:
    return {"size": facts["lfs"]["size"], "pointerSize": facts["lfs"]["pointerSize"]}


def _refuse(fault: Mapping[str, Any], request: web.Request) -> None:
    if "token" in fault and request.headers.get("Authorization") != f"Bearer {fault['token']}":
        fault = {"status": 401, "code": "RepoNotFound"}
    if "status" in fault:
        error = web.HTTPException(headers={"X-Error-Code": fault["code"]} if "code" in fault else {})
        error.set_status(fault["status"])
        raise error


async def _send(
    request: web.Request, content: bytes, headers: Mapping[str, str], fault: Mapping[str, Any], change: asyncio.Event
) -> web.StreamResponse:
    """The bytes that were asked for; `drop` and `stall` count from the file's beginning."""
    in_part = "Range" in request.headers and fault.get("ranges", True)
    begin = (request.http_range.start or 0) if in_part else 0
    stop = min(request.http_range.stop or len(content), len(content)) if in_part else len(content)
    if begin >= len(content) > 0:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{len(content)}"})
    response = web.StreamResponse(status=206 if in_part else 200, headers=headers)
    response.content_length = stop - begin
    if in_part:
        response.headers["Content-Range"] = f"bytes {begin}-{stop - 1}/{len(content)}"
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    end = min(stop, fault.get("drop", stop), fault.get("stall", stop))
    await response.write(content[begin:end])
    if "stall" in fault:
        await change.wait()
    if ("drop" in fault or "stall" in fault) and request.transport is not None:
        request.transport.close()
    return response


async def main(root: Path) -> None:
    runner = web.AppRunner(Hub(root).app(), shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
