"""What a guest says of itself through QEMU's guest agent. It may say anything: all is bounded."""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.model import Fact


class GuestQuestion(StrEnum):
    """What to ask. A ping is answered with the guest's host name."""

    PING = "ping"
    OS = "os"
    USERS = "users"
    FILESYSTEMS = "filesystems"
    INTERFACES = "interfaces"


class GuestAsk(Fact):
    """`rpc.agent.guest`: ask the agent in a VM's guest; without questions all that it can tell.

    `timeout_s` bounds the whole, whatever the guest does.
    """

    uid: str
    about: tuple[GuestQuestion, ...] = ()
    timeout_s: float = Field(5.0, ge=1, le=60)


class GuestOs(Fact):
    """The guest's `os-release` and kernel, and its time zone, in its own words."""

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


class GuestUser(Fact):
    """Who is logged in; `login_time_s` in seconds since 1970, by the guest's clock."""

    name: str
    domain: str = ""
    login_time_s: float = 0.0


class GuestFilesystem(Fact):
    """A mounted file system. `disks` are the targets, such as vda, that it lies on."""

    name: str
    mountpoint: str = ""
    type: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    disks: tuple[str, ...] = ()


class GuestInterface(Fact):
    """A network interface as the guest has it; `addresses` with their prefix."""

    name: str
    mac: str = ""
    addresses: tuple[str, ...] = ()


class GuestInfo(Fact):
    """What the guest answered; what was not asked for, or it cannot tell, is empty."""

    hostname: str = ""
    os: GuestOs | None = None
    users: tuple[GuestUser, ...] = ()
    filesystems: tuple[GuestFilesystem, ...] = ()
    interfaces: tuple[GuestInterface, ...] = ()
