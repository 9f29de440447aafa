"""Questions to QEMU's guest agent, and its answers.

Answers are untrusted. nodeagent limits the size of every field.
"""

import base64
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from virtbus.schemas.model import LenientModel


class GuestQuestion(StrEnum):
    """The possible questions. The answer to a ping is the guest's host name."""

    PING = "ping"
    OS = "os"
    USERS = "users"
    FILESYSTEMS = "filesystems"
    INTERFACES = "interfaces"


class GuestAsk(LenientModel):
    """`rpc.agent.guest`: asks a VM's guest agent the questions in `about`.

    An empty `about` means all questions. `timeout_s` bounds the whole request.
    """

    uid: str
    about: tuple[GuestQuestion, ...] = ()
    timeout_s: float = Field(5.0, ge=1, le=60)


EXEC_S = 600.0
"""Longest time limit of a command in a guest."""
EXEC_OUTPUT_BYTES = 256 * 1024
"""Limit of each output of a command; the rest is dropped."""
EXEC_WORDS = 256
EXEC_WORD_BYTES = 64 * 1024


class GuestExec(LenientModel):
    """`rpc.agent.exec`: runs a program in the guest by its guest agent, and waits for its end.

    `words` are the program and its arguments. After `timeout_s` the program is killed.
    """

    uid: str
    words: tuple[Annotated[str, StringConstraints(max_length=EXEC_WORD_BYTES)], ...] = Field(
        min_length=1, max_length=EXEC_WORDS
    )
    timeout_s: float = Field(10.0, ge=1, le=EXEC_S)


class GuestExecuted(LenientModel):
    """The end of a program in a guest. After a signal, `exit_code` is 128 + the signal.

    `stdout` and `stderr` have the first bytes of the program's output, base64 in JSON.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""

    @field_validator("stdout", "stderr", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Decode base64, the form of bytes in JSON."""
        return base64.b64decode(value) if isinstance(value, str) else value


class GuestOs(LenientModel):
    """The guest's `os-release`, kernel and time zone, as the guest reports them."""

    id: str = ""
    name: str = ""
    pretty_name: str = ""
    version: str = ""
    version_id: str = ""
    variant: str = ""
    variant_id: str = ""
    kernel_release: str = ""
    kernel_version: str = ""
    machine: str = ""
    timezone: str = ""
    utc_offset_s: int = 0


class GuestUser(LenientModel):
    """A logged-in user; `login_time_s` is in seconds since 1970, by the guest's clock."""

    name: str
    domain: str = ""
    login_time_s: float = 0.0


class GuestFilesystem(LenientModel):
    """A mounted file system. `disks` are the domain's target names of its disks, such as vda."""

    name: str
    mountpoint: str = ""
    type: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    disks: tuple[str, ...] = ()
    spec_disks: tuple[str, ...] = ()
    """The names that these disks have in the VM's spec."""


class GuestInterface(LenientModel):
    """A network interface in the guest; `addresses` have a prefix length."""

    name: str
    mac: str = ""
    addresses: tuple[str, ...] = ()


class GuestInfo(LenientModel):
    """The guest's answers. Fields that were not asked for, or have no answer, are empty."""

    hostname: str = ""
    os: GuestOs | None = None
    users: tuple[GuestUser, ...] = ()
    filesystems: tuple[GuestFilesystem, ...] = ()
    interfaces: tuple[GuestInterface, ...] = ()
