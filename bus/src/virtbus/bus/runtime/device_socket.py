"""Asks the agent of the host for an open device, over `devices.sock` in its run folder."""

import json
import os
import socket
from pathlib import Path

NAME = "devices.sock"
GRANTED, REFUSED = b"+", b"-"
MAX_BYTES = 1024
TIMEOUT_S = 10.0


def open_device(path: Path, pool: str, volume: str) -> int:
    """Return the open device of a volume, `namespace.name`, for reading and writing. It blocks.

    Raises:
        OSError: the agent does not answer, or refuses with the reason as text.
    """
    return _asked(path, {"pool": pool, "volume": volume})


def open_host_device(path: Path, device: str) -> int:
    """Return an open device of the host. The agent follows a VM whose root disk is on it.

    `devices_allowed` has to permit it, too. It raises as `open_device`.
    """
    return _asked(path, {"device": device})


def _asked(path: Path, request: dict[str, str]) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.connect(str(path))
        asking.sendall(json.dumps(request).encode())
        answer, devices, _, _ = socket.recv_fds(asking, MAX_BYTES, 1)
    if answer[:1] == GRANTED and devices:
        os.set_inheritable(devices[0], False)
        return devices[0]
    for one in devices:
        os.close(one)
    raise OSError(0, answer[1:].decode(errors="replace") or "the agent does not answer")
