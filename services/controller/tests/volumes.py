"""Volumes for the tests of the controller."""

from collections.abc import Awaitable
from typing import Any

from services.controller.tests.fleets import GIB, uid

from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.volume import VolumeRecord, VolumeSpec


def volume(number: int = 1, name: str = "data", **more: Any) -> VolumeRecord:
    """Return an empty volume of one GiB."""
    values: dict[str, Any] = {
        "uid": uid(number),
        "namespace": "default",
        "name": name,
        "spec": VolumeSpec(size=GIB),
        "created_ns": number,
    }
    return VolumeRecord(**(values | more))


async def tried(asking: Awaitable[object]) -> str:
    """Return the reason of a refusal, or "done"."""
    try:
        await asking
    except VirtbusError as error:
        return error.reason
    return "done"
