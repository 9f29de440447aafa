"""Checks a path of a spec against the devices of this host that VMs may have."""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

_DEVICES = Path("/dev")
_BUSY_S, _AGAIN_S = 3.0, 0.05


def allowed_device(path: str, patterns: Sequence[str]) -> str:
    """Return the real path of a device, if one of the patterns below /dev matches it.

    Links in `path` and in the found devices are followed before the comparison, so a link in `path`
    permits no other device. The call blocks.

    Raises:
        ValueError: no pattern matches the device.
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


def open_exclusively(path: str) -> int:
    """Open a device for reading, unless the host uses it; raises OSError.

    imaged also opens devices exclusively, to write images to them. So the call waits up to 3 s
    while the device is busy.
    """
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)
