"""Checks volumes with answer files for Windows setup, in a raw request."""

from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.schemas.errors import Detail
from virtbus.schemas.seed import ANSWERS

Raw = Mapping[str, Any]


def sysprep_problems(volumes: Sequence[Raw], disks: Sequence[Raw]) -> list[Detail]:
    """Return why Windows setup would not find the answer files on these volumes."""
    found: list[Detail] = []
    if all(volume.get("sysprep") is None for volume in volumes):
        return found
    by_name = {str(disk.get("name")): (index, disk) for index, disk in enumerate(disks)}
    for number, volume in enumerate(volumes):
        given = volume.get("sysprep")
        if not isinstance(given, Mapping):
            continue
        if not any(name.lower() in ANSWERS for name in _names(given)):
            message = f"needs a file of the name {' or '.join(sorted(ANSWERS))}"
            found.append(Detail(path=f"spec.volumes[{number}].sysprep.data", message=message))
        index, disk = by_name.get(str(volume.get("name")), (0, {"device": "cdrom", "bus": "sata"}))
        if disk.get("device", "disk") != "cdrom" or disk.get("bus") not in ("sata", "scsi"):
            path = f"spec.domain.devices.disks[{index}].device"
            message = "must be cdrom, on sata or scsi: Windows setup looks for answers there"
            found.append(Detail(path=path, message=message))
    return found


def _names(given: Raw) -> list[str]:
    maps = [given.get("data"), given.get("binary_data")]
    return [str(name) for one in maps if isinstance(one, Mapping) for name in one]
