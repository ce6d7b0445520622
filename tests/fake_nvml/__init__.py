"""A fake NVIDIA driver: `libnvidia-ml.so.1` built from nvml.c, its cards described in a file.

    library = fake_nvml.build(tmp_path_factory.mktemp("nvml"))       # skips the test without a C compiler
    driver = fake_nvml.Driver(library, tmp_path / "cards", [Card(uuid="GPU-aaa", total=80 << 30)])
    env = {**os.environ, **driver.environment()}                    # for a process with the real bindings: a router
    fake_nvml.occupy(driver.state, "GPU-aaa", 3 << 30)              # in a process: until it ends, it holds so much

In a preset, `env.FAKE_NVML = ...` tells a fake worker which file to `occupy` by; the uuid is its CUDA_VISIBLE_DEVICES.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15

SOURCE = Path(__file__).parent / "nvml.c"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card, or one MIG instance of a card. Sizes in bytes."""

    uuid: str
    total: int
    used: int = 0  # by processes that are not ours
    reserved: int = 0
    name: str = "NVIDIA Fake"
    error: int = 0  # NVML error code of the memory call
    lookup: int = 0  # NVML error code of finding the card
    instances: Sequence["Card"] = ()  # not empty: the card is in MIG mode

    def to_text(self, kind: str = "device") -> str:
        """The lines of nvml.c's state file."""
        line = (
            f"{kind} uuid={self.uuid} total={self.total} reserved={self.reserved} used={self.used} error={self.error}"
            f" lookup={self.lookup} mig={int(bool(self.instances))} name={self.name}\n"
        )
        return line + "".join(each.to_text("instance") for each in self.instances)


class Driver:
    """The fake driver's state, and what a process needs in its environment to meet it."""

    def __init__(self, library: Path, state: Path, cards: Sequence[Card]):
        self.library = library
        self.state = state
        self.show(cards)

    def show(
        self, cards: Sequence[Card], *, init: int = 0, boot: int = 0, has_v2: bool = True, lists: bool = True
    ) -> None:
        """From now on these are the cards. `init`: NVML error code of nvmlInit; `boot`: another number than before: the
        driver was reloaded meanwhile; `has_v2`: a driver of today; `lists`: it says which processes use a card.
        """
        head = f"init {init}\nboot {boot}\nv2 {int(has_v2)}\nlists {int(lists)}\n"
        text = head + "".join(card.to_text() for card in cards)
        draft = self.state.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(self.state)

    def environment(self) -> dict[str, str]:
        return {"FAKE_NVML": str(self.state), "LD_LIBRARY_PATH": str(self.library.parent)}


def build(folder: Path) -> Path:
    """The library, compiled into `folder`. Skips the test if this machine has no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        import pytest  # not above: fake workers import this module as well, and should start fast

        pytest.skip("needs a C compiler (cc, gcc or clang) for the fake NVML library")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def occupy(state: Path, uuid: str, size: int) -> None:
    """This process holds `size` bytes of the card, in all, until it ends."""
    folder = state.with_name(state.name + ".d")
    folder.mkdir(exist_ok=True)
    draft = folder / f"{os.getpid()}.draft"
    draft.write_text(f"{uuid} {size}\n")
    draft.replace(folder / str(os.getpid()))
