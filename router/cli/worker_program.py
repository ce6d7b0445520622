"""A run of the worker program for one command, such as `worker estimate`, in the foreground."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import TypeVar

from router.cli.worker_packages import missing_packages
from router.config.presets import Preset
from router.errors import RouterError
from router.launch.interface import Verb
from router.launch.process import decode_event
from router.launch.spawn import environment
from worker.protocol.argv import Convert, Download, Estimate, to_argv
from worker.protocol.events import Converted, Downloaded, Estimated, Failed, Progress

Result = TypeVar("Result", Converted, Downloaded, Estimated)


class WorkerProgramError(RouterError):
    """The worker program could not be started, or it exited without a result."""

    def __init__(self, message: str, exit: int | None = None):
        super().__init__(message)
        self.exit = exit  # of a worker program that ran


def run_worker(
    preset: Preset,
    command: Convert | Download | Estimate,
    result: type[Result],
    environ: Mapping[str, str],
    *,
    report: Callable[[int, int], object] = lambda done, total: None,
    offline: bool = True,
    hf_token: str = "",
) -> Result:
    """The event of type `result` that ends `command`. Blocks without a time limit, since the user can interrupt it.

    The process has the environment of a worker. Only a download that is not `offline` has network access and the token
    of the hub. `report` is called with the steps done and their total. Raises WorkerProgramError.
    """
    verb: Verb = "convert" if result is Converted else "download" if result is Downloaded else "estimate"
    argv = [preset.python or sys.executable, "-P", "-m", "worker", *to_argv(command)]
    threads = 1 if isinstance(command, Download) else command.threads
    env = environment(
        environ, verb, tag=verb, visible="", threads=threads, extra=preset.env, offline=offline, hf_token=hf_token
    )  # fmt: skip
    if verb != "download" and not preset.python and (lacks := missing_packages()):
        raise WorkerProgramError(f"{preset.id}: {lacks}")
    failure = ""
    # A file and not a pipe: a full pipe would block the process while its stdout is read.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            message = f"{argv[0]} cannot be started: {error.strerror or error}"
            raise WorkerProgramError(f"{preset.id}: {message}") from None
        with process:
            try:
                for line in process.stdout or ():
                    match decode_event(line):
                        case Progress(done=done, total=total):
                            report(done, total)
                        case Failed(message=message):
                            failure = message
                        case found if isinstance(found, result):
                            return found
            except BaseException:
                process.kill()  # an incomplete conversion is deleted by the next one
                raise
        errors.seek(0)
        log = errors.read().decode(errors="replace").strip().splitlines()
    why = failure or (log[-1] if log else "it ended without a result")
    raise WorkerProgramError(
        f"{preset.id}: `worker {verb}` failed (exit {process.returncode}): {why}", process.returncode
    )
