"""Copies the NICs of a VM for a new VM."""

from collections.abc import Mapping
from typing import Any

_OF_ONE_VM = ("mac_address", "publish", "addresses")


def copied_nics(devices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the NICs of a VM's devices without the fields that only one VM can have."""
    nics = devices.get("interfaces") or ()
    return [{key: value for key, value in nic.items() if key not in _OF_ONE_VM} for nic in nics]
