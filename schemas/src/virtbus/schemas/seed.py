"""Models of the small ISO disks that virtbus writes for a guest: cloud-init seeds and files.

Their secret fields are only in `$KV.sec`, never in a record or status.
"""

import json
from operator import not_
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, model_validator

from virtbus.schemas.base64_text import (
    FILE_CHARACTERS,
    Base64,
    bytes_of,
    check_base64,
    decode_base64,
)
from virtbus.schemas.guest_files import (
    EnvironmentName,
    EnvironmentValue,
    GuestFile,
    GuestLink,
    GuestMount,
    HostAlias,
)
from virtbus.schemas.ids import DomainHostName, HostName
from virtbus.schemas.model import StrictModel
from virtbus.schemas.network_config import check_network_config, check_network_data
from virtbus.schemas.network_findings import Findings
from virtbus.schemas.user_data import CONTENT_TYPE, content_type

FILES = 128
HOST_ALIASES_MAX, HOST_ALIAS_CHARACTERS_MAX = 256, 64 * 1024
NETWORK_BYTES = META_BYTES = 32 * 1024
NETWORK_LATER = {"network data": "is checked later"}
"""A validation context in which network data is not checked, because parsing it is slow. The caller
checks the network data itself, once."""
PARTS = 32


NetworkBase64 = Annotated[
    str, StringConstraints(max_length=NETWORK_BYTES * 4 // 3 + 4), AfterValidator(check_base64)
]
SshKey = Annotated[
    str, StringConstraints(min_length=16, max_length=8192, pattern=r"^[^\r\n\x00]*$")
]
"""One line of an authorized_keys file (INJ-10)."""


def _meta_data(text: str) -> str:
    try:
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        msg = f"must be a JSON object: {error}"
        raise ValueError(msg) from None
    if not isinstance(found, dict):
        msg = "must be a JSON object"
        raise ValueError(msg)  # noqa: TRY004  pydantic reports ValueError
    return text


def _no_number(name: str) -> float:
    msg = f"{name} is no number"
    raise ValueError(msg)


MetaData = Annotated[str, StringConstraints(max_length=META_BYTES), AfterValidator(_meta_data)]


class UserDataPart(StrictModel):
    """One of several sources of user data, as text or as base64.

    Without `content_type`, the kind of the data is detected by its first line, as in cloud-init.
    """

    data: str | None = Field(None, max_length=FILE_CHARACTERS)
    data_base64: Base64 | None = None
    content_type: Annotated[str, StringConstraints(pattern=CONTENT_TYPE, max_length=81)] | None = (
        None
    )

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if (self.data is None) == (self.data_base64 is None):
            msg = "give either data or data_base64"
            raise ValueError(msg)
        if self.content_type is None and not content_type(self.content):
            msg = (
                "is of a kind that cloud-init ignores; begin it with #cloud-config, #!, #include, "
                "## template: jinja or a MIME header, or give its content_type"
            )
            raise ValueError(msg)
        return self

    @property
    def content(self) -> bytes:
        return bytes_of(self.data, self.data_base64) or b""


class CloudInit(StrictModel):
    """Data for cloud-init at first boot, independent of the datasource.

    User, vendor and network data are each given as text or as base64 (not both). The base64 may
    contain any bytes, such as gzip. cloud-init applies vendor data below user data: the user's
    values win. `user_data_parts` follow `user_data`. Parts that are cloud-configs are merged; other
    parts become parts of a MIME message.
    """

    user_data: str | None = Field(None, max_length=FILE_CHARACTERS)
    user_data_base64: Base64 | None = None
    user_data_parts: tuple[UserDataPart, ...] = Field((), max_length=PARTS)
    vendor_data: str | None = Field(None, max_length=FILE_CHARACTERS)
    vendor_data_base64: Base64 | None = None
    network_data: str | None = Field(None, max_length=NETWORK_BYTES)
    network_data_base64: NetworkBase64 | None = None
    meta_data: MetaData | None = Field(None, exclude_if=not_)
    """Further keys of the meta-data, as a JSON object. virtbus overwrites keys that it sets."""
    hostname: HostName | None = None
    fqdn: DomainHostName | None = Field(None, exclude_if=not_)
    """The host name with its domain (`hostname -f`). `hostname` stays the guest's own name."""
    ssh_keys: tuple[SshKey, ...] = Field((), max_length=64)
    environment: dict[EnvironmentName, EnvironmentValue] = Field(
        default_factory=dict, max_length=256
    )
    """Becomes /etc/cloud/environment in the guest."""
    write_files: tuple[GuestFile, ...] = Field((), max_length=FILES)
    mounts: tuple[GuestMount, ...] = Field((), max_length=24)
    links: tuple[GuestLink, ...] = Field((), max_length=24)
    """Mounts and links are not secret, so a record has them, too."""
    host_aliases: tuple[HostAlias, ...] = Field((), max_length=HOST_ALIASES_MAX, exclude_if=not_)
    """A record has no host aliases, because they can be larger than a record may be."""

    @model_validator(mode="after")
    def _short_aliases(self) -> Self:
        characters = sum(len(one.ip) + sum(map(len, one.hostnames)) for one in self.host_aliases)
        if characters > HOST_ALIAS_CHARACTERS_MAX:
            msg = f"host_aliases must have {HOST_ALIAS_CHARACTERS_MAX} characters at most"
            raise ValueError(msg)
        return self

    @property
    def user_bytes(self) -> bytes | None:
        return bytes_of(self.user_data, self.user_data_base64)

    @property
    def vendor_bytes(self) -> bytes | None:
        return bytes_of(self.vendor_data, self.vendor_data_base64)

    @property
    def network_bytes(self) -> bytes | None:
        return bytes_of(self.network_data, self.network_data_base64)

    @property
    def more_meta(self) -> dict[str, Any]:
        return dict(json.loads(self.meta_data)) if self.meta_data else {}

    def without_secrets(self) -> Self:
        """Return the seed without secrets, for a record; the same object if it contains none.

        SSH keys are left out as well, because they can be larger than a record may be.
        """
        if all(getattr(self, name) == empty for name, empty in _WITHOUT_SECRETS.items()):
            return self
        return self.model_copy(update={**_WITHOUT_SECRETS, "environment": {}})


TEXTS = ("user_data", "vendor_data", "network_data")
"""Fields that are given as text, or as base64 under the same name with `_base64`."""
_SECRET = tuple(f"{name}{form}" for name in TEXTS for form in ("", "_base64"))
_SECRET_LISTS = ("user_data_parts", "ssh_keys", "write_files", "host_aliases")
_WITHOUT_SECRETS: dict[str, Any] = {
    **dict.fromkeys(_SECRET),
    **dict.fromkeys(_SECRET_LISTS, ()),
    "environment": {},
    "meta_data": None,
}


class CloudInitNoCloud(CloudInit):
    """A seed of the datasource NoCloud (label `cidata`).

    The network data is a network-config of version 1 or 2, in YAML.
    """

    def network_findings(self) -> Findings:
        data = self.network_bytes
        return Findings() if data is None else check_network_config(data)

    @model_validator(mode="after")
    def _network(self, info: ValidationInfo) -> Self:
        if info.context is not NETWORK_LATER:
            _raise_first(self.network_findings())
        return self


class CloudInitConfigDrive(CloudInit):
    """A seed of the datasource ConfigDrive (label `config-2`), in OpenStack's layout.

    The network data is OpenStack's network_data.json.
    """

    def network_findings(self) -> Findings:
        data = self.network_bytes
        return Findings() if data is None else check_network_data(data)

    @model_validator(mode="after")
    def _network(self, info: ValidationInfo) -> Self:
        if info.context is not NETWORK_LATER:
            _raise_first(self.network_findings())
        return self


FileName = Annotated[
    str, StringConstraints(pattern=r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$", max_length=64)
]
"""A key of a ConfigMap or Secret, not longer than a file name in Joliet."""


class FilesVolume(StrictModel):
    """Files by name on a read-only ISO: KubeVirt's ConfigMap, Secret or Sysprep volume.

    `data` is text, `binary_data` base64. A running guest sees the files of its last start.
    """

    volume_label: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,16}$")] = "cfgdata"
    data: dict[FileName, Annotated[str, StringConstraints(max_length=FILE_CHARACTERS)]] = Field(
        default_factory=dict, max_length=FILES
    )
    binary_data: dict[FileName, Base64] = Field(default_factory=dict, max_length=FILES)

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        twice = sorted(set(self.data) & set(self.binary_data))
        if twice:
            msg = f"{twice[0]} is both in data and in binary_data"
            raise ValueError(msg)
        return self

    @property
    def contents(self) -> dict[str, bytes]:
        text = {name: value.encode() for name, value in self.data.items()}
        return text | {name: decode_base64(value) for name, value in self.binary_data.items()}

    def without_secrets(self) -> Self:
        return self.model_copy(update={"data": {}, "binary_data": {}})


class SysprepVolume(FilesVolume):
    """Answer files for Windows setup, which looks for such files on every CD-ROM.

    One of the files is `autounattend.xml` or `unattend.xml`, in upper or lower case.
    """

    volume_label: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,16}$")] = "unattendCD"


ANSWERS = frozenset({"autounattend.xml", "unattend.xml"})
"""Names of the answer files that Windows setup looks for, in lower case."""


def _raise_first(findings: Findings) -> None:
    if findings.problems:
        msg = f"network data: {'; '.join(findings.problems[:3])}"
        raise ValueError(msg)
