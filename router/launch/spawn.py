"""How a process of the worker program is started: its environment, and fork or exec.

The environment is an allow-list of the router's own, plus devices and limits. A variable that is not named here is not
passed on, above all no secret. Only `download` uses a network, and only it gets a hub token.
"""

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from router.launch.exit_causes import lost_at_spawn
from router.launch.fork_server import FIRST_PAUSE, ForkServerSupervisor
from router.launch.interface import NotStarted, Program, Verb
from router.launch.process import Child, Log, uncancelled
from router.launch.process_table import TAG, ProcessTable
from worker.protocol.argv import Command, ModelOptions, to_argv

# The command of a worker. `-P` keeps the current folder out of its imports.
PYTHON_ARGV = (sys.executable, "-P", "-m", "worker")

KEPT = frozenset(
    {
        # the system
        "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
        # caches, which only name folders
        "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    }
)  # fmt: skip
KEPT_PREFIXES = ("LC_", "CUDA_", "PYTORCH_")

KEPT_ONLINE = frozenset(
    {
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HF_ENDPOINT", "HF_TOKEN_PATH",
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    }
)  # fmt: skip
KEPT_ONLINE_PREFIXES = ("HF_HUB_", "HF_XET_")

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN")

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PROXY")


class Spawner:
    """Starts processes of the worker program and ends them, by fork where that is possible."""

    def __init__(
        self,
        processes: ProcessTable,
        *,
        environ: Mapping[str, str],
        offline: bool,
        hf_token: str,
        python_argv: Sequence[str] = PYTHON_ARGV,
        fork_server_pause: float = FIRST_PAUSE,
    ):
        self._processes = processes
        self._environment = partial(environment, dict(environ), offline=offline, hf_token=hf_token)
        self._argv = tuple(python_argv)
        # A worker gets its own environment with its fork; this one belongs to the fork server.
        fork_server_environment = partial(self._environment, "serve", visible="", threads=1, extra={})
        self.fork_servers = ForkServerSupervisor(processes, self._argv, fork_server_environment, fork_server_pause)

    def can_fork(self, program: Program, verb: Verb) -> bool:
        return self.fork_servers.can_fork and may_fork(program, verb)

    @asynccontextmanager
    async def running(
        self, program: Program, command: Command, verb: Verb, tag: str, token: str, visible: str = ""
    ) -> AsyncIterator[Child]:
        """A child process that has its token, for the length of the block.

        `tag`: the name of this run. `visible`: CUDA_VISIBLE_DEVICES. Raises WorkerLost, NotStarted. However the block
        ends, the process group is killed and reaped before the block is left.
        """
        try:
            # Not cancelled between fork and registration: a process without an entry in the table would be lost.
            child = await uncancelled(self._spawn(program, command, verb, tag, token, visible))
            child.send(token.encode() + b"\n")  # the first line that it reads; its stdin stays open
            yield child
        finally:
            await uncancelled(self._processes.end(tag))

    async def _spawn(self, program: Program, command: Command, verb: Verb, tag: str, token: str, visible: str) -> Child:
        """Start a process by fork if possible, else by exec, and register it. Raises WorkerLost, NotStarted."""
        threads = command.threads if isinstance(command, ModelOptions) else 1
        env = self._environment(verb, tag=tag, visible=visible, threads=threads, extra=program.env)
        name = program.worker if verb == "serve" else f"{program.worker} ({verb})"
        output = Log(program.model, name, secrets=(token, *secrets(env)))
        child = None
        if self.can_fork(program, verb):
            child = await self.fork_servers.spawn(command, env, name=name, output=output)
        if child is None and verb == "serve" and program.must_fork:
            raise NotStarted(f"{program.worker}: no fork server can fork it, and an executed worker needs more memory")
        if child is None:
            argv = to_argv(replace(command, supervised=True, parent_pid=os.getpid()))
            argv = [program.python or self._argv[0], *self._argv[1:], *argv]
            try:
                # Downloads go to the shared hub cache, so their files keep the user's umask.
                child = Child.spawn(argv, env, name=name, log=output, private=verb != "download")
            except OSError as error:
                raise lost_at_spawn(program, verb, argv[0], error) from error
        self._processes.add(tag, child, program.worker)
        return child


def may_fork(program: Program, verb: Verb) -> bool:
    """True if a process of `verb` behaves the same forked or executed.

    A download does not: it uses the network, and the libraries in the fork server are set to work offline. The preset's
    interpreter and environment only have an effect when libraries are loaded, which a forked process does not do.
    """
    return verb != "download" and program.forks and not program.python and not program.env


def environment(
    environ: Mapping[str, str],
    verb: Verb,
    *,
    tag: str,
    visible: str,
    threads: int,
    extra: Mapping[str, str],
    offline: bool,
    hf_token: str,
) -> dict[str, str]:
    """The whole environment of a process of `verb`.

    `environ`: the router's own. `visible`: CUDA_VISIBLE_DEVICES, empty for none. `extra`: the preset's. It may change
    limits, but neither the devices nor the access to the hub, and it cannot give a hub token to a serving worker.
    """
    online = verb == "download" and not offline
    kept = {name: value for name, value in environ.items() if _is_kept(name, online=online)}
    if online and hf_token:
        kept["HF_TOKEN"] = hf_token
    count = str(max(1, threads))
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"),
        count,
    )
    limits |= {"MALLOC_ARENA_MAX": "2", "HF_HUB_DISABLE_TELEMETRY": "1"}
    allowed = {name: value for name, value in extra.items() if online or name not in HUB_TOKENS}
    fixed = {TAG: tag, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    if not online:
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    return kept | limits | allowed | fixed  # later ones win


def secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not appear in a log. Very short ones are left out: masking them would garble it."""
    return tuple(
        value for name, value in env.items() if len(value) >= 6 and any(word in name.upper() for word in _SECRET_WORDS)
    )


def _is_kept(name: str, *, online: bool) -> bool:
    if name in KEPT or name.startswith(KEPT_PREFIXES):
        return True
    return online and (name in KEPT_ONLINE or name.startswith(KEPT_ONLINE_PREFIXES))
