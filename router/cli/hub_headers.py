"""Facts about a repository on the hub, without downloading it.

The module writes a skeleton of the snapshot: small files whole, weight files with their true size but only their
headers (the rest is a hole, which takes no disk space). Code that reads a snapshot for its size can read the skeleton.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from router.errors import RouterError
from worker.protocol.pickled_weights import PICKLED_SUFFIXES
from worker.protocol.snapshot_files import (
    INDEX,
    MAX_HEADER_BYTES,
    NO_GGUF,
    QUANTIZE_CONFIGS,
    WEIGHTS,
    is_below,
    shard_names,
    single_weights,
)

HUB = "https://huggingface.co"
TIMEOUT = 30.0  # seconds without a byte
FIRST = 1 << 16  # bytes of a weight file in the first request. Most headers are shorter, so one request is enough.
MAX_SMALL = 64 << 20

_SMALL = frozenset({
    "config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "modules.json",
    "sentence_bert_config.json", *QUANTIZE_CONFIGS, INDEX,
})  # fmt: skip


class RemoteError(RouterError):
    """The hub did not give the facts. The message has the reason and the remedy."""


def skeleton(repo: str, revision: str, folder: Path, *, environ: Mapping[str, str], token: str = "") -> None:
    """Write the skeleton of `repo` at `revision` (branch, tag or commit) into `folder`.

    HF_ENDPOINT in `environ` names another hub. Blocks while the hub answers. Raises RemoteError.
    """
    base = environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT, follow_redirects=True) as client:
            answer = client.get(f"/api/models/{repo}/revision/{revision}")
            _check(answer, repo, base)
            commit, names = _listing(answer)
            hub = _Hub(client, base, repo, commit or revision)
            _check_model(names, repo)
            for name in names:
                if name in _SMALL and not (name == INDEX and WEIGHTS in names):  # The same order as a download.
                    _write(folder / name, hub.whole(name))
            for name in _weights(folder, names, repo):
                head, size = hub.header(name)
                _write(folder / name, head)
                os.truncate(folder / name, size)
    except httpx.HTTPError as error:
        raise RemoteError(
            f"{base} cannot be reached ({type(error).__name__}), and {repo} is not here; name a folder with its files"
        ) from None
    except OSError as error:
        raise RemoteError(f"{folder} cannot be written: {error.strerror or error}") from None


class _Hub:
    """One commit of one repository."""

    def __init__(self, client: httpx.Client, base: str, repo: str, revision: str):
        self._client, self._base, self._repo, self._revision = client, base, repo, revision

    def whole(self, name: str) -> bytes:
        content, _ = self._read(name, 0, MAX_SMALL)
        return content

    def header(self, name: str) -> tuple[bytes, int]:
        """The first bytes of a safetensors file up to the end of its header, and the size of the file.

        Raises RemoteError if the content is not safetensors.
        """
        head, size = self._read(name, 0, FIRST)
        end = 8 + int.from_bytes(head[:8], "little")
        if len(head) < 8 or not 8 < end <= min(size, MAX_HEADER_BYTES):
            raise RemoteError(f"{self._repo}: {name} on {self._base} is no safetensors file")
        if end > len(head):
            rest, _ = self._read(name, len(head), end - len(head))
            head += rest
        if len(head) < end:
            raise RemoteError(f"{self._repo}: {self._base} broke off in the header of {name}; try again")
        return head[:end], size

    def _read(self, name: str, start: int, most: int) -> tuple[bytes, int]:
        """Up to `most` bytes from `start`, and the size of the file. No more is read, even if the hub sends the whole
        file."""
        wanted = {"Range": f"bytes={start}-{start + most - 1}"}
        url = f"/{self._repo}/resolve/{self._revision}/{name}"
        with self._client.stream("GET", url, headers=wanted) as answer:
            _check(answer, self._repo, self._base)
            skip = 0 if answer.status_code == httpx.codes.PARTIAL_CONTENT else start
            content = bytearray()
            for piece in answer.iter_bytes():
                content += piece
                if len(content) >= skip + most:
                    break
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total) if total.isdigit() else int(answer.headers.get("Content-Length", 0)) or len(content)
            return bytes(content[skip : skip + most]), size


def _check(answer: httpx.Response, repo: str, base: str) -> None:
    """Raises RemoteError unless the request succeeded."""
    status = answer.status_code
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        gated = answer.headers.get("X-Error-Code") == "GatedRepo"
        what = "is gated: accept its terms there and give --hf-token" if gated else "is not there, or needs --hf-token"
        raise RemoteError(f"{repo} on {base} {what}")
    if status == httpx.codes.NOT_FOUND:
        raise RemoteError(f"{repo}: {base} has no such repository, revision or file; check the name")
    if not answer.is_success:
        raise RemoteError(f"{repo}: {base} answers {status}; try again later")


def _listing(answer: httpx.Response) -> tuple[str, list[str]]:
    """The commit and the file names."""
    try:
        body: Any = answer.json()
        names = [str(file["rfilename"]) for file in body["siblings"]]
        return str(body.get("sha") or ""), [name for name in names if is_below(name)]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RemoteError(f"{answer.url.host} answers with no list of files; is it a hub?") from None


def _check_model(names: Collection[str], repo: str) -> None:
    """Raises RemoteError for a repository that is not a model."""
    ends = {name.rpartition(".")[2] for name in names}
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise RemoteError(f"{repo} is an adapter, which needs the model that it was made for: name that model")
        if "gguf" in ends:
            raise RemoteError(
                f"{repo} has GGUF files only: {NO_GGUF}; choose the original repository, with safetensors weights"
            )
        raise RemoteError(f"{repo} has no config.json: it is no model for transformers")
    if "safetensors" not in ends:
        pickles = sorted(name for name in names if name.endswith(PICKLED_SUFFIXES))
        if pickles:
            raise RemoteError(
                f"{repo} has no safetensors weights, only {pickles[0]}, whose sizes are not known from headers;"
                " download it first with `router download`, or choose another repository or revision"
            )
        raise RemoteError(f"{repo} has no safetensors weights; choose another repository or revision")


def _weights(folder: Path, names: Iterable[str], repo: str) -> list[str]:
    """The weight files of the model, and those of the modules after it (one in each folder).

    Raises RemoteError if one of them is missing.
    """
    known = set(names)
    index = folder / INDEX
    try:
        parts = set(shard_names(index.read_bytes())) if index.is_file() else {single_weights(known)}
    except ValueError as error:
        raise RemoteError(f"{INDEX} of {repo} {error}; choose another revision") from None
    if missing := sorted(parts - known):
        raise RemoteError(f"{repo} lacks {missing[0]}, of which its weights are made; choose another revision")
    behind = {name for name in known if name.count("/") == 1 and name.endswith("/model.safetensors")}
    return sorted(parts | behind)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
