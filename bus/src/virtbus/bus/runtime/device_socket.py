"""Asks the host's agent, over a socket, to open devices and to make or change logical volumes."""

import errno
import json
import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from virtbus.schemas.disk import DISK_MAX
from virtbus.schemas.ids import Id
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.wire import decode, encode_json, validate

NAME = "devices.sock"
GRANTED, REFUSED, FULL = b"+", b"-", b"="
MAX_BYTES = 1024
ANSWER_MAX = 256 * 1024
TIMEOUT_S = 10.0
GROUP_S = 60.0
"""Time limit of a request about a logical volume. The agent runs LVM's commands during it."""

_ID = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
VolumeFolder = Annotated[str, StringConstraints(pattern=rf"^{_ID}\.{_ID}\.[0-9a-f-]{{36}}$")]
"""`namespace.name.uid`, as `VolumeRef.folder`."""


class LogicalRequest(StrictModel):
    """A request for the logical volume (LV) of a volume. Repeating a request is safe.

    - `open`: open the LV, if it exists.
    - `make`: make and open the LV. Replace an LV with incomplete content; refuse if complete.
    - `grow`: make the LV at least `size_bytes` large, and open it.
    - `mark`: note that the first `size_bytes` are complete and that `operation` wrote them.
    - `unmark`: note that the content is not complete.
    - `remove`: remove the LV, if it exists.
    - `list`: list the LVs whose volume comes after `volume` in alphabetical order.
    """

    pool: Id
    volume: VolumeFolder | Literal[""] = ""
    do: Literal["open", "make", "grow", "mark", "unmark", "remove", "list"]
    size_bytes: int = Field(0, ge=0, le=DISK_MAX)
    operation: str = Field("", pattern=r"^[0-9A-Za-z-]{0,64}$")


class LogicalAnswer(LenientModel):
    """The state of a logical volume; `size_bytes` 0 means that it does not exist."""

    size_bytes: int = 0
    filled_bytes: int = 0
    """Number of complete bytes from the start; 0 means that the content is incomplete."""
    operation: str = ""
    thin: bool = False
    """If True, unwritten areas read as zeroes."""
    volumes: dict[str, int] = Field(default_factory=dict)
    """The answer to `list`: the sizes in bytes by `namespace.name.uid`, in order."""
    more: bool = False
    """If True, the list continues after the last of `volumes`."""


def open_device(path: Path, pool: str, volume: str) -> int:
    """Open a volume's device for reading and writing; return its file descriptor.

    `volume` is `namespace.name`. All functions of this module block the thread.

    Raises:
        OSError: the agent does not answer, or refuses with the reason as text.
    """
    return _opened(path, {"pool": pool, "volume": volume})


def open_host_device(path: Path, device: str) -> int:
    """Open a device of the host for a VM's root disk; return its file descriptor.

    The agent opens only devices that its setting `devices_allowed` permits, and that are a disk
    with an image of a VM on this node. Raises as `open_device`.
    """
    return _opened(path, {"device": device})


def refuse_used(path: Path, pool: str, folder: str) -> None:
    """Raise OSError if a VM of this node has the volume `folder` of `pool`.

    Also raises as `open_device`.
    """
    _asked(path, json.dumps({"pool": pool, "clear": folder}).encode(), TIMEOUT_S)


def ask_logical(path: Path, request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
    """Return the state of a logical volume, and its open device if the agent opened it.

    Raises as `open_device`; OSError ENOSPC means that the volume group has no room.
    """
    answer, device = _asked(path, encode_json(request), GROUP_S)
    try:
        return validate(LogicalAnswer, decode(answer)), device
    except BaseException:
        if device is not None:
            os.close(device)
        raise


def _opened(path: Path, request: dict[str, str]) -> int:
    _, device = _asked(path, json.dumps(request).encode(), TIMEOUT_S)
    if device is None:
        raise OSError(0, "the agent does not answer")
    return device


def _check(answer: bytes) -> None:
    if answer[:1] != GRANTED:
        why = answer[1:].decode(errors="replace") or "the agent does not answer"
        raise OSError(errno.ENOSPC if answer[:1] == FULL else 0, why)


def _asked(path: Path, request: bytes, timeout_s: float) -> tuple[bytes, int | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(timeout_s)
        asking.connect(str(path))
        asking.sendall(request)
        answer, devices, _, _ = socket.recv_fds(asking, MAX_BYTES, 1)
        try:
            while len(answer) < ANSWER_MAX and (more := asking.recv(ANSWER_MAX)):
                answer += more
            _check(answer)
        except BaseException:
            for one in devices:
                os.close(one)
            raise
    if not devices:
        return answer[1:], None
    os.set_inheritable(devices[0], False)
    return answer[1:], devices[0]
