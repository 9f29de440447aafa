"""Questions to QEMU's guest agent, and its answers.

Answers are untrusted. nodeagent limits the size of every field.
"""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.model import LenientModel


class GuestQuestion(StrEnum):
    """The possible questions. The answer to a ping is the guest's host name."""

    PING = "ping"
    OS = "os"
    USERS = "users"
    FILESYSTEMS = "filesystems"
    INTERFACES = "interfaces"


class GuestAsk(LenientModel):
    """`rpc.agent.guest`: asks a VM's guest agent the questions in `about`, or all if it is empty.

    `timeout_s` bounds the whole request.
    """

    uid: str
    about: tuple[GuestQuestion, ...] = ()
    timeout_s: float = Field(5.0, ge=1, le=60)


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
    """A mounted file system. `disks` are its target devices, such as vda."""

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
