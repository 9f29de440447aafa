"""Checks a path of a spec against the devices of this host that VMs may have."""

import os
from collections.abc import Sequence
from pathlib import Path

_DEVICES = Path("/dev")


def allowed_device(path: str, patterns: Sequence[str]) -> str:
    """Return the real path of a device that one of the patterns below /dev names.

    The real path counts, so a link cannot lead elsewhere. It blocks.

    Raises:
        ValueError: no pattern names it.
    """
    real = os.path.realpath(path)
    below = (one.removeprefix("/dev/") for one in patterns)
    if any(os.path.realpath(one) == real for each in below for one in _DEVICES.glob(each)):
        return real
    msg = (
        f"the device {real} is not among those of this node's agent; its operator adds it to "
        "devices_allowed in nodeagent.toml"
    )
    raise ValueError(msg)
