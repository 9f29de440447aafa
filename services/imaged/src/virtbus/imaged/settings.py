"""Defines imaged's settings."""

from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, IPvAnyNetwork, model_validator

from virtbus.bus.runtime.pool_settings import check_pools
from virtbus.bus.runtime.settings import CONFIG_DIR, ServiceSettings
from virtbus.imaged.core.limits import DownloadLimits, SpaceLimits, TransferLimits
from virtbus.imaged.core.uploads import UploadLimits
from virtbus.schemas.quantity import Bytes

GIB = 1024**3
_LIMITS = TransferLimits()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        if (":" in bare) == (host != bare) and 1 <= int(port) <= 65_535:
            return str(ip_address(bare)), int(port)
    except ValueError:
        pass
    msg = f"download_address {text!r} is not ADDRESS:PORT, such as 10.0.0.5:8480 or [fd00::5]:8480"
    raise ValueError(msg)


class Settings(ServiceSettings):
    """Settings of `virtbus-imaged`."""

    service: ClassVar[str] = "imaged"

    allowed_roots: tuple[Path, ...] = Field(
        (),
        description="directories that file:// images may come from; empty: images/src in "
        "state_dir, and /usr/share/virtbus/images",
    )
    names_dir: Path = Field(
        CONFIG_DIR / "images.d",
        description=(
            "*.toml, *.yaml and *.yml files of image names and transports; read again when they "
            "change"
        ),
    )
    names: dict[str, str] = Field(
        default_factory=dict, description="more image names, each with its URL[@sha256:digest]"
    )
    min_free_bytes: Bytes = Field(
        2 * GIB, ge=0, description="bytes of the store's disk that images must leave free"
    )
    min_free_ratio: float = Field(
        0.01, ge=0, lt=1, description="share of the store's disk that images must leave free"
    )
    quota_bytes: Bytes = Field(
        0,
        ge=0,
        description="bytes of disk that images and partial downloads may use; unused images are "
        "removed first, pinned ones never; 0: as much as min_free_bytes allows",
    )
    pools_file: Path = Field(
        CONFIG_DIR / "pools.toml",
        description="the pools of this node for volumes, see howto/pools.md; read at the start",
    )
    backup_dir: Path | None = Field(
        None,
        description="the directory for backups, which must exist and be imaged's; it may be on "
        "another file system, or shared by nodes; unset: this node makes no backups",
    )
    max_bytes: Bytes = Field(_LIMITS.max_bytes, ge=1, description="bytes of the largest image file")
    max_virtual_bytes: Bytes = Field(
        _LIMITS.max_virtual_bytes,
        ge=1024**2,
        description="bytes of the largest virtual disk, of an image or of a volume",
    )
    max_expansion: int = Field(
        _LIMITS.max_expansion,
        ge=1,
        description="expansion factor of a compressed image or layer, beyond 64 MiB",
    )
    insecure_registries: tuple[str, ...] = Field(
        (), description="registries (host[:port]) of container images that speak plain http only"
    )
    registry_auth_file: Path = Field(
        CONFIG_DIR / "registry-auth.json",
        description="logins for registries, in docker login's format; read again for each pull",
    )
    registry_realms: dict[str, str] = Field(
        default_factory=dict,
        description="registries, each with the host that may receive its password for a token",
    )
    registry_mirrors: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "registries (docker.io), each with the mirror (host[:port]) that is asked instead"
        ),
    )
    max_pulls: int = Field(
        4,
        ge=1,
        le=64,
        description="number of images that are fetched or received at once; SHA-256 needs CPU",
    )
    max_uploads: int = Field(
        64,
        ge=1,
        description="images that one account may have uploaded to this node, with its unfinished "
        "uploads",
    )
    pull_timeout_s: float = Field(
        _LIMITS.total_timeout_s, gt=0, description="seconds after which a pull fails"
    )
    image_addresses: tuple[IPvAnyNetwork, ...] = Field(
        (),
        description=(
            "networks (10.1.0.0/16, fd00::/8) in addition to the public ones that images and "
            "container images may come from; private, link-local and loopback ones only if "
            "listed here"
        ),
    )
    name_max_age_s: float = Field(
        14 * 86_400.0,
        ge=60,
        description=(
            "seconds after its last use at which the name of an image (a URL) is removed; "
            "those of the node's VMs, of images that disks use, and of images.d stay"
        ),
    )
    max_names: int = Field(
        2000,
        ge=1,
        description=(
            "number of image names to keep; the least recently used are removed first, those "
            "of the node's VMs never"
        ),
    )

    download_address: str = Field(
        "",
        description="ADDRESS:PORT on which exports are served by HTTP to those who have a link; "
        "empty: none are served",
    )
    download_url: str = Field(
        "",
        pattern=r"^(https?://[^\s/?#]+(/[^\s?#]*[^\s/?#])?)?$",
        description="beginning of the links, if a proxy or a name leads to download_address; "
        "empty: made of the address",
    )
    download_certificate: Path | None = Field(
        None, description="file with the certificate (PEM, with its chain) for HTTPS"
    )
    download_key: Path | None = Field(None, description="file with the key of the certificate")
    download_rate_bytes: Bytes = Field(
        0, ge=0, description="bytes per second of all downloads by HTTP together; 0: no limit"
    )
    max_downloads: int = Field(
        32,
        ge=1,
        le=1024,
        description="connections of downloads by HTTP; one address has three quarters at most",
    )

    @model_validator(mode="after")
    def _has_pools(self) -> Self:
        check_pools(self.pools_file)
        return self

    @model_validator(mode="after")
    def _downloads_are_clear(self) -> Self:
        if (self.download_certificate is None) != (self.download_key is None):
            msg = "set both download_certificate and download_key, or neither"
            raise ValueError(msg)
        if self.download_address:
            host = _address(self.download_address)[0]
            if ip_address(host).is_unspecified and not self.download_url:
                msg = f"download_address {host} is no address for links: set download_url too"
                raise ValueError(msg)
        return self

    @property
    def downloads(self) -> DownloadLimits | None:
        """Return the settings of the HTTP server; None without `download_address`."""
        if not self.download_address:
            return None
        pair = None
        if self.download_certificate is not None and self.download_key is not None:
            pair = self.download_certificate, self.download_key
        return DownloadLimits(
            address=_address(self.download_address),
            url=self.download_url or f"http{'s' if pair else ''}://{self.download_address}",
            certificate=pair,
            at_once=self.max_downloads,
            bytes_per_s=self.download_rate_bytes,
        )

    @property
    def roots(self) -> tuple[str, ...]:
        default = (self.state_dir / "images" / "src", Path("/usr/share/virtbus/images"))
        return tuple(str(root) for root in self.allowed_roots or default)

    @property
    def space(self) -> SpaceLimits:
        return SpaceLimits(self.min_free_bytes, self.min_free_ratio, self.quota_bytes)

    @property
    def uploads(self) -> UploadLimits:
        return UploadLimits(self.max_pulls, self.max_uploads)

    @property
    def limits(self) -> TransferLimits:
        return TransferLimits(
            max_bytes=self.max_bytes,
            max_virtual_bytes=self.max_virtual_bytes,
            max_expansion=self.max_expansion,
            total_timeout_s=self.pull_timeout_s,
            allowed_addresses=self.image_addresses,
        )
