"""The simulation finds bugs that are planted here, never in the product."""

from typing import Any

import pytest
from tests.sim.bus import SimBus
from tests.sim.hostports import SimFiles
from tests.sim.run import run

from virtbus.bus.client.ports import Entry
from virtbus.schemas.records import read_volume
from virtbus.schemas.subjects import VOLUME_KEYS
from virtbus.schemas.wire import encode

SEEDS = range(1, 26)


class BlindBus(SimBus):
    """Puts of records without compare-and-set: the last writer wins."""

    async def put(self, key: str, value: bytes, **more: Any) -> int:
        if key.startswith("$KV.vm.") and not key.startswith("$KV.vm._"):
            more["expect"] = more["expect_over"] = None
        return await super().put(key, value, **more)


class BlindVolumes(SimBus):
    """Reads volumes without their holders: a VM takes the volume of another VM."""

    async def get(self, key: str) -> Entry | None:
        entry = await super().get(key)
        if entry is None or not entry.value or not key.startswith(VOLUME_KEYS):
            return entry
        free = read_volume(key, entry.value).model_copy(update={"holder": ""})
        return entry._replace(value=encode(free))


def found(*kinds: str, **more: Any) -> bool:
    """Return True if a seed violates one of these invariants. A bug also has later effects."""
    violations = (one for seed in SEEDS for one in run(seed, **more).violations)
    return any(one.split()[0] in kinds for one in violations)


@pytest.mark.timeout(120)
def test_a_put_without_the_required_compare_and_set_is_found() -> None:
    undone = "a change, a delete or a move is undone"
    assert found("I2", "I3", "I15", controller_bus=BlindBus), undone


@pytest.mark.timeout(120)
def test_a_controller_that_does_not_see_the_holders_of_volumes_is_found() -> None:
    taken = "a VM, or a delete, takes the volume of another VM"
    assert found("I1", controller_bus=BlindVolumes), taken


@pytest.mark.timeout(120)
def test_an_agent_that_does_not_remember_epochs_and_deletes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def forget(self: SimFiles, uid: str, *, refused_epoch: int = 0) -> None:
        """Reports the record as removed, and leaves it on the disk."""

    monkeypatch.setattr(SimFiles, "forget", forget)
    assert found("I3", "I5")
