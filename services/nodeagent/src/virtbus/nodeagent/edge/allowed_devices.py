"""Checks a spec's path against this host's devices that VMs may have."""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

_DEVICES = Path("/dev")
_BUSY_S, _AGAIN_S = 3.0, 0.05


def allowed_device(path: str, patterns: Sequence[str]) -> str:
    """Return the real path of a device that matches one of the patterns below /dev.

    The comparison follows links on both sides, so a link in `path` permits no other device. Blocks.

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
    """Open a device for reading. Raises OSError, for example if the host uses the device.

    imaged also opens devices exclusively, to write images. The call therefore waits up to 3 s for a
    busy device.
    """
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)
