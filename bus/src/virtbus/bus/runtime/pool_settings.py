"""Reads the pools of a node, `/etc/virtbus/pools.toml`, for imaged and the nodeagent (ADR 0060)."""

import re
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import Id
from virtbus.schemas.model import StrictModel
from virtbus.schemas.pool import ASSIGNED_MAX, LOCAL, POOLS_MAX, PoolKind
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.wire import validate

_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_UNSTABLE = re.compile(r"^/dev/(sd|vd|hd|xvd|nvme)[^/]*$")
PROBE_S = 4.0
"""Interval of the check that each pool is usable."""
OVERCOMMIT = 10.0
"""Default of `overcommit`. It is above 1, because guests' disks are mostly empty. It has a limit,
because a full pool pauses its guests."""


def _stable_path(path: str) -> str:
    if _UNSTABLE.match(path):
        msg = f"{path} may be another disk after a boot; use its name in /dev/disk/by-id"
        raise ValueError(msg)
    return path


def _one_spelling(path: str) -> str:
    if {"", ".", ".."} & set(path.removeprefix("/").split("/")):
        msg = f"{path} has `.`, `..` or an empty part; write the path that names one file"
        raise ValueError(msg)
    return path


VolumeKey = Annotated[str, StringConstraints(pattern=rf"^{_NAME}\.{_NAME}$")]
DevicePath = Annotated[
    str,
    StringConstraints(pattern=r"^/dev/[0-9A-Za-z._:@+/-]{1,200}$"),
    AfterValidator(_one_spelling),
    AfterValidator(_stable_path),
]
LvmName = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Za-z_+.][0-9A-Za-z_+.-]{0,99}$"),
    AfterValidator(_one_spelling),
]
ExportName = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._:/-]{1,200}$")]
IscsiUnit = Annotated[
    str, StringConstraints(pattern=r"^(iqn|eui|naa)\.[0-9A-Za-z.:-]{1,200}/[0-9]{1,5}$")
]
RbdImage = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._-]{1,90}/[0-9A-Za-z._-]{1,90}$")]
NfsPath = Annotated[
    str,
    StringConstraints(pattern=r"^(/[0-9A-Za-z._@+-]{1,200}){1,20}$"),
    AfterValidator(_one_spelling),
]


class LocalPool(StrictModel):
    """A directory: `<state_dir>/disks/pools/<name>`, or `disks/volumes` for the pool `local`."""

    kind: Literal[PoolKind.LOCAL]
    mount: bool = True
    """If True, the directory must be a mount point. Without this check, a missing disk would look
    like an empty disk. The pool `local` needs no mount point."""
    overcommit: float = Field(OVERCOMMIT, ge=0)
    """The sum of the sizes that guests see, as a multiple of the pool's size; 0: no limit."""
    reserve: Bytes | None = Field(None, ge=0)
    """Bytes that new data leaves free; default: min_free_bytes and min_free_ratio of imaged."""


class BlockPool(StrictModel):
    """Devices of the host. Each volume of the pool is one device."""

    kind: Literal[PoolKind.BLOCK]
    volumes: dict[VolumeKey, DevicePath] = Field(default_factory=dict, max_length=ASSIGNED_MAX)
    """The device of each volume, by `namespace.name`. virtbus overwrites these devices."""

    @model_validator(mode="after")
    def _has_one_volume_each(self) -> Self:
        _refuse_twice(self.volumes, "device")
        return self


class LvmPool(StrictModel):
    """A volume group of the host.

    virtbus makes, grows and removes only its own logical volumes in this group.
    """

    kind: Literal[PoolKind.LVM]
    group: LvmName
    thin_pool: LvmName | None = None
    """The group's thin pool for new volumes; None gives each volume its own extents."""
    overcommit: float = Field(OVERCOMMIT, ge=0)
    """With a thin pool: the sum of the sizes that guests see, as a multiple of the thin pool's
    size; 0: no limit."""
    reserve: Bytes = Field(0, ge=0)
    """Bytes that new data leaves free."""


Host = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:-]{1,253}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
User = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._@+-]{0,100}$")]
SecretPath = Annotated[str, StringConstraints(pattern=r"^((/[0-9A-Za-z._@+-]{1,200}){1,20})?$")]


class _OnServer(StrictModel):
    """A pool on a server. QEMU itself connects to the server, so the host needs no driver."""

    volumes: dict[VolumeKey, ExportName] = Field(default_factory=dict, max_length=ASSIGNED_MAX)
    """The export, unit, image or path of each volume, by `namespace.name`. All values differ."""

    @model_validator(mode="after")
    def _has_one_volume_each(self) -> Self:
        _refuse_twice(self.volumes, "place")
        return self


class _WithLogin(_OnServer):
    user: User = ""
    """The user's name on the server; empty means no login."""
    secret_file: SecretPath = ""
    """The file with the secret. Only root may read it."""

    @model_validator(mode="after")
    def _has_both_or_none(self) -> Self:
        if bool(self.user) != bool(self.secret_file):
            msg = "a login has both `user` and `secret_file`"
            raise ValueError(msg)
        return self


class NbdPool(_OnServer):
    """An NBD server. Volumes are exports."""

    kind: Literal[PoolKind.NBD]
    host: Host
    port: Port = 10809
    tls: bool = False
    """If True, QEMU connects by TLS, with the certificates of `nbd_tls_x509_cert_dir` in libvirt's
    qemu.conf. virtbus does not read their keys."""


class IscsiPool(_WithLogin):
    """An iSCSI portal. A login uses CHAP. Volumes are logical units, as `target/number`."""

    kind: Literal[PoolKind.ISCSI]
    host: Host
    port: Port = 3260
    volumes: dict[VolumeKey, IscsiUnit] = Field(default_factory=dict, max_length=ASSIGNED_MAX)


class RbdPool(_WithLogin):
    """A Ceph cluster. Volumes are images, as `pool/image`."""

    kind: Literal[PoolKind.RBD]
    monitors: tuple[Host, ...] = Field(min_length=1, max_length=9)
    port: Port = 3300
    """The port of all monitors: 3300, or 6789 for the older protocol."""
    volumes: dict[VolumeKey, RbdImage] = Field(default_factory=dict, max_length=ASSIGNED_MAX)

    @property
    def host(self) -> str:
        return ", ".join(self.monitors)


class NfsPool(_OnServer):
    """An NFS server with version 3 of the protocol. Volumes are the paths of raw files."""

    kind: Literal[PoolKind.NFS]
    host: Host
    user: int | None = Field(None, ge=0, le=2**31)
    """The user id that the server sees; default: the user id of QEMU's process."""
    group: int | None = Field(None, ge=0, le=2**31)
    """The group id that the server sees; default: the group id of QEMU's process."""
    volumes: dict[VolumeKey, NfsPath] = Field(default_factory=dict, max_length=ASSIGNED_MAX)

    @model_validator(mode="after")
    def _has_both_ids_or_none(self) -> Self:
        if (self.user is None) != (self.group is None):
            msg = "set both `user` and `group`, or none"
            raise ValueError(msg)
        return self

    @property
    def port(self) -> int:
        """Return NFS's port. QEMU uses no other port."""
        return 2049


def _refuse_twice(volumes: Mapping[str, str], what: str) -> None:
    twice = {one for one, other in pairwise(sorted(volumes.values())) if one == other}
    if twice:
        msg = f"two volumes have the {what} {min(twice)!r}: guests would destroy its data"
        raise ValueError(msg)


ServerPool = NbdPool | IscsiPool | RbdPool | NfsPool
"""A pool on a server, to which QEMU itself connects."""
PoolSettings = LocalPool | BlockPool | LvmPool | ServerPool


class _File(StrictModel):
    pools: dict[Id, Annotated[PoolSettings, Field(discriminator="kind")]] = Field(
        default_factory=dict, max_length=POOLS_MAX
    )

    @model_validator(mode="after")
    def _keeps_reports_small(self) -> Self:
        pools = self.pools.values()
        assigned = [one.volumes for one in pools if not isinstance(one, LocalPool | LvmPool)]
        if sum(map(len, assigned)) > ASSIGNED_MAX:
            msg = f"the pools of a node have at most {ASSIGNED_MAX} volumes in their settings"
            raise ValueError(msg)
        return self


_DEFAULT = LocalPool(kind=PoolKind.LOCAL)


def load_pools(path: Path) -> Mapping[str, PoolSettings]:
    """Return the pools of a file, and `local`. Without the file, return only `local`.

    Raises:
        VirtbusError: 400 with the path of each invalid setting.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {LOCAL: _DEFAULT}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    try:
        plain = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, str(error)) from error
    pools = validate(_File, plain).pools
    if pools.get(LOCAL, _DEFAULT).kind is not PoolKind.LOCAL:
        raise _unreadable(path, "the pool `local` is of the kind local; give the other a name")
    return {LOCAL: _DEFAULT, **pools}


def check_pools(path: Path) -> None:
    """Raise ValueError if the file has invalid pools."""
    try:
        load_pools(path)
    except VirtbusError as error:
        problems = "; ".join(f"{one.path}: {one.message}" for one in error.body.details)
        raise ValueError(f"{path}: {problems}" if problems else str(error)) from error


def _unreadable(path: Path, why: str) -> VirtbusError:
    message = f"{path}: {why}; `virtbus config check` shows the settings"
    return VirtbusError(Code.INVALID, "pool_settings", message)
