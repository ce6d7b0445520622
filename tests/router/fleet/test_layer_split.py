"""A model that fits on no device is split over as few devices as possible. One that fits is not split."""

from dataclasses import replace

import pytest

from router.api.status import status
from router.errors import DoesNotFit
from router.fleet import worker_argv
from router.fleet.scheduler import candidate_of, demand_of
from router.launch.interface import WorkerLost
from router.memory.checkpoint_facts import Linears, Part, Tally
from tests.fakes import CPU, GIB, GPU0, GPU1, FakeModel
from tests.router.fleet.worlds import LLAMA, Schedule
from worker.protocol.argv import Estimate

# A GiB of elements in each of its 4 layers, 2 bytes each.
FOUR_GIB = replace(LLAMA, by_layer=(Part({"bfloat16": Tally(GIB, 2 * GIB)}),) * 4)
FOUR_GIB = replace(FOUR_GIB, tensors={"bfloat16": replace(LLAMA.tensors["bfloat16"], elements=4 * GIB, bytes=8 * GIB)})


def world(total: int, *, real: int = 9 * GIB, small: int = 0, **keys: object) -> Schedule:
    """A model `big` of 8 GiB of weights and `real` bytes in all, beside `a` and `b`; two accelerators of `total`."""
    models = {"big": FakeModel(shards=(real // 2, real - real // 2), host=GIB)}
    models |= {name: FakeModel(shards=(small,), host=GIB) for name in "ab"}
    stated = {"": small, "cpu": GIB}
    scene = Schedule(
        {"big": 0, "a": small, "b": small},
        totals={CPU: 64 * GIB, GPU0: total, GPU1: total},
        models=models,
        keys={
            "big": {"required_memory": {}, **keys},
            "a": {"required_memory": stated},
            "b": {"required_memory": stated},
        },
    )
    scene.files.checkpoint = FOUR_GIB
    return scene


async def test_a_model_that_fits_on_no_device_is_split_over_two() -> None:
    scene = world(7 * GIB)
    await scene.ask("big")
    worker = scene.worker("big")
    assert (set(worker.place), sum(scene.costs("big").choice.layers)) == ({GPU0, GPU1}, 4)
    assert worker.reserved[GPU0] > 4 * GIB < worker.reserved[GPU1]
    assert "estimate big" not in scene.journal, "its weights alone say so"


@pytest.mark.parametrize(("real", "devices"), [(8 * GIB + GIB // 8, 1), (9 * GIB, 2)])
async def test_the_exact_estimate_decides_if_the_first_exceeds_a_device(real: int, devices: int) -> None:
    scene = world(8 * GIB + GIB // 4, real=real)  # its weights would fit
    await scene.ask("big")
    assert len(scene.worker("big").place) == devices
    assert scene.journal[0] == "estimate big"


async def test_a_split_is_made_without_an_exact_estimate() -> None:
    scene = world(8 * GIB + GIB // 4)
    scene.launcher.models["big"].estimate_fails = [WorkerLost("broke", cause="crashed", exit=1)]
    await scene.ask("big")
    assert len(scene.worker("big").place) == 2


async def test_a_model_larger_than_all_devices_is_refused_with_the_figures_of_each() -> None:
    scene = world(4 * GIB)
    with pytest.raises(DoesNotFit) as refused:
        await scene.ask("big")
    assert "split over 2 devices" in refused.value.message
    assert set(refused.value.extra["devices"]) == {"cuda:0", "cuda:1"}


async def test_a_refusal_names_the_settings_that_would_fit() -> None:
    scene = world(7 * GIB, split_mode="none")
    scene.files.checkpoint = replace(FOUR_GIB, linears=Linears(28, 4 * GIB, 1000, GIB // 16))
    with pytest.raises(DoesNotFit, match=r"; set quantization = bnb-8bit$"):
        await scene.ask("big")


async def test_gpu_split_is_never_exceeded() -> None:
    scene = world(12 * GIB, gpu_split=(3 * GIB, 7 * GIB + GIB // 2))
    scene.launcher.models["big"].shards = (2 * GIB, 7 * GIB)
    await scene.ask("big")
    assert scene.worker("big").place == (GPU0, GPU1)
    assert scene.worker("big").reserved[GPU0] <= 3 * GIB
    await scene.stop()

    scene = world(12 * GIB, gpu_split=(3 * GIB, 10 * GIB))
    await scene.ask("big")
    assert scene.worker("big").place == (GPU1,), "where it may have as much as it needs"


async def test_a_model_that_exceeds_its_gpu_memory_utilization_is_refused_by_this_name() -> None:
    scene = world(40 * GIB, gpu_memory_utilization=0.1, split_mode="none")
    with pytest.raises(DoesNotFit, match=r"needs at least [0-9]+ MiB, but gpu-memory-utilization and the device sizes"):
        await scene.ask("big")
    assert scene.launcher.over_commits == []
    shown = status(scene.fleet, scene.fleet.models["big"])
    assert (shown["reason"], shown["failed"]) == ("does_not_fit", True)
    assert shown["error"].startswith("big: it needs at least ")


async def test_tensor_parallelism_reserves_all_devices_of_the_preset_at_once() -> None:
    scene = world(12 * GIB, small=6 * GIB, tensor_parallel=2)
    scene.files.checkpoint = replace(FOUR_GIB, matrix_elements=4 * GIB, heads=4, kv_heads=2, intermediate=64)
    await scene.ask("a")
    await scene.ask("b")
    await scene.ask("big")
    worker = scene.worker("big")
    assert (set(worker.place), scene.costs("big").choice.ranks) == ({GPU0, GPU1}, 2)
    assert worker.reserved[GPU0] == worker.reserved[GPU1] >= 4 * GIB
    command = worker_argv.options(worker, Estimate)
    assert (command.devices, command.tensor_parallel, command.layers) == (("cuda:0", "cuda:1"), 2, ())
    assert command.prefill_chunk == 2048
    assert candidate_of(worker, demand_of(worker)).runtime == 0, "the other ranks know what to load before they begin"


async def test_a_worker_gets_the_prompt_budget_of_its_preset() -> None:
    """LMI's max_rolling_batch_prefill_tokens."""
    scene = world(12 * GIB, max_prefill_tokens=4096)
    await scene.ask("big")
    assert worker_argv.options(scene.worker("big"), Estimate).prefill_chunk == 4096


async def test_a_model_that_tensor_parallelism_does_not_divide_is_split_by_layers_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = world(12 * GIB, tensor_parallel=2)
    scene.files.checkpoint = replace(FOUR_GIB, matrix_elements=4 * GIB, heads=3)
    await scene.ask("big")
    worker, choice = scene.worker("big"), scene.costs("big").choice
    assert (set(worker.place), sum(choice.layers), choice.ranks) == ({GPU0, GPU1}, 4, 1)
    command = worker_argv.options(worker, Estimate)
    assert (command.tensor_parallel, len(command.layers)) == (1, 2)
    assert (
        caplog.messages.count(
            "big: tensor-parallel = 2 is not possible, so its layers are split over 2 accelerators: it has 3 attention"
            " heads, which 2 does not divide"
        )
        == 1
    )


async def test_a_key_of_placement_without_effect_is_logged_at_the_load(caplog: pytest.LogCaptureFixture) -> None:
    scene = world(12 * GIB, required_memory={"cuda:7": GIB})
    await scene.ask("big")
    warning = "big: required-memory names cuda:7, and there is no such device here, only cpu, cuda:0, cuda:1"
    assert warning in caplog.messages
