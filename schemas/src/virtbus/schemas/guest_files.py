"""Files, environment and mounts of a VM's spec, which virtbus adds to the guest's cloud-config."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from virtbus.schemas.base64_text import FILE_CHARACTERS, Base64, bytes_of
from virtbus.schemas.dns import DomainName, IpText
from virtbus.schemas.ids import Id
from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Count

EnvironmentName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)
]
EnvironmentValue = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x08\x0A-\x1F\x7F]*$", max_length=FILE_CHARACTERS)
]
"""One line (INJ-08). A text of several lines must be given as a file."""
GuestPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1F\x7F]*$", max_length=1024)]
HOSTNAMES_MAX = 64
_ACCOUNT = r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"


class GuestFile(StrictModel):
    """A file that cloud-init writes at first boot; `content` is text, `content_base64` any bytes.

    If the owner is not root, the file is written after the users exist (cloud-init 21.2).
    """

    path: GuestPath
    content: str | None = Field(None, max_length=FILE_CHARACTERS)
    content_base64: Base64 | None = None
    mode: Annotated[str, StringConstraints(pattern=r"^[0-7]{3,4}$")] = "0644"
    owner: Annotated[
        str, StringConstraints(pattern=rf"^{_ACCOUNT}(:{_ACCOUNT})?$", max_length=65)
    ] = "root:root"

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if (self.content is None) == (self.content_base64 is None):
            msg = "give either content or content_base64"
            raise ValueError(msg)
        return self

    @property
    def data(self) -> bytes:
        return bytes_of(self.content, self.content_base64) or b""


AUTO = "auto"
"""With this value of `filesystem`, cloud-init mounts the file system that it finds on the disk."""


class GuestMount(StrictModel):
    """A volume of the VM that cloud-init mounts by its path in /dev/disk/by-id.

    The volume needs a file system. `make_filesystem` makes a file system at first boot. It is
    permitted only for an empty disk of the VM's own, because other volumes may have data. For other
    volumes, a user can choose cloud-init's `fs_setup`.
    """

    volume: Id
    path: Annotated[str, StringConstraints(pattern=r"^/[^\s\x00-\x1F\x7F]*$", max_length=1024)]
    filesystem: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_.-]{1,32}$")] = AUTO
    options: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_=,.:/@+-]{1,256}$")] = (
        "defaults,nofail"
    )
    partition: Count | None = Field(None, ge=1, le=128)
    make_filesystem: bool | None = None
    """None means False. True needs a named `filesystem` and no `partition`; admission checks that.
    """


class GuestLink(StrictModel):
    """A symbolic link in the guest to the disk of a volume. Each boot makes the link again."""

    volume: Id
    path: GuestPath


class HostAlias(StrictModel):
    """Names of an address in the guest's /etc/hosts, which each boot writes again."""

    ip: IpText
    hostnames: tuple[DomainName, ...] = Field(min_length=1, max_length=HOSTNAMES_MAX)
