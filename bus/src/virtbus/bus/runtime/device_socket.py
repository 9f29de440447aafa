"""Asks the agent of the host for an open device, over `devices.sock` in its run folder."""

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
"""The agent needs so long for the commands of LVM, at most."""

_ID = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
VolumeFolder = Annotated[str, StringConstraints(pattern=rf"^{_ID}\.{_ID}\.[0-9a-f-]{{36}}$")]
"""`namespace.name.uid`, as `VolumeRef.folder`."""


class LogicalRequest(StrictModel):
    """A request for the logical volume of a volume. Each may be repeated.

    - `open`: open it, if there is one.
    - `make`: make it, instead of a half-made one. One with complete content is refused.
    - `grow`: make it larger, and open it.
    - `mark`: its first `size_bytes` are complete, the work of `operation`.
    - `unmark`: its content is not complete.
    - `remove`: remove it.
    - `list`: list the volumes that are greater than `volume`.
    """

    pool: Id
    volume: VolumeFolder | Literal[""] = ""
    do: Literal["open", "make", "grow", "mark", "unmark", "remove", "list"]
    size_bytes: int = Field(0, ge=0, le=DISK_MAX)
    operation: str = Field("", pattern=r"^[0-9A-Za-z-]{0,64}$")


class LogicalAnswer(LenientModel):
    """A logical volume; without a size there is none."""

    size_bytes: int = 0
    filled_bytes: int = 0
    """The bytes from its start that are complete; 0: its content is not."""
    operation: str = ""
    """The operation that wrote its content."""
    thin: bool = False
    """Its parts read as zeroes until they are written."""
    volumes: dict[str, int] = Field(default_factory=dict)
    """Of a list: the sizes by `namespace.name.uid`, in order."""
    more: bool = False


def open_device(path: Path, pool: str, volume: str) -> int:
    """Return the open device of a volume, `namespace.name`, for reading and writing. It blocks.

    Raises:
        OSError: the agent does not answer, or refuses with the reason as text.
    """
    return _opened(path, {"pool": pool, "volume": volume})


def open_host_device(path: Path, device: str) -> int:
    """Return an open device of the host. The agent follows a VM whose root disk is on it.

    `devices_allowed` has to permit it, too. It raises as `open_device`.
    """
    return _opened(path, {"device": device})


def refuse_used(path: Path, pool: str, folder: str) -> None:
    """Raise OSError if a VM of this node has a volume of a pool, as `open_device`. It blocks."""
    _asked(path, json.dumps({"pool": pool, "clear": folder}).encode(), TIMEOUT_S)


def ask_logical(path: Path, request: LogicalRequest) -> tuple[LogicalAnswer, int | None]:
    """Return what the agent says of a logical volume, and the open device if it opened one.

    It blocks, and raises as `open_device`; ENOSPC if the volume group has no room.
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
    """Return the text of the answer, and the device that came with it."""
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
