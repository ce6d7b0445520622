"""A process that opens `Devices` and says what it sees, one JSON line for each line on its stdin.

`read` reads all devices; `name TEXT` asks which device TEXT is; `occupy UUID BYTES` holds memory of a card;
`worker NAME` asks, as a worker does, what is in use on a device and by this process.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from router.config.option_types import device_name
from router.launch.devices import Devices
from tests import fake_nvml


def main() -> None:
    devices = Devices(os.environ)
    for line in sys.stdin:
        print(json.dumps(answer(devices, *line.split())), flush=True)


@cache
def worker_memory() -> Any:
    # Late, because it imports torch, which takes longer than all else here.
    from worker.engines.transformers.device.process_overhead import NvmlMemory

    return NvmlMemory()


def answer(devices: Devices, verb: str, *words: str) -> Any:
    if verb == "read":
        readings = devices.read()
        return {
            "readings": {
                str(each.id): {"total": each.total, "used": each.used, "uuid": each.uuid} for each in readings
            },
            "names": [each.name for each in readings],
            "problems": {str(device): problem for device, problem in devices.problems.items()},
            "notes": list(devices.notes),
            "driver": devices.driver,
            "pools": {str(each.id): str(each.pool or each.id) for each in readings},
        }
    if verb == "name":
        try:
            return str(devices.device_id(device_name(words[0])))
        except ValueError as error:
            return f"error: {error}"
    if verb == "worker":
        return {"used": worker_memory().used(words[0]), "own": worker_memory().own(words[0])}
    fake_nvml.occupy(Path(os.environ["FAKE_NVML"]), words[0], int(words[1]))
    return None


if __name__ == "__main__":
    main()
