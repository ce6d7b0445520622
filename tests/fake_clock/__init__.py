"""A wall clock that jumps, for one process: a library built from clock.c, and the file that tells it how far."""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "clock.c"


class Clock:
    """Of the processes that have its `environment`. Skips the test if this machine has no C compiler."""

    def __init__(self, folder: Path):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            import pytest

            pytest.skip("needs a C compiler (cc, gcc or clang) for the wall clock that jumps")
        self._library, self._file = folder / "clock.so", folder / "jump"
        command = [compiler, "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._file.write_bytes(bytes(8))

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "FAKE_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """From now on it is so far from what the kernel says; all of it at once, as the file is mapped."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
            shared[:] = struct.pack("<q", seconds)


__all__ = ["Clock"]
