"""Defines the parts of CRI's requests that virtbus reads, with CRI's own field names.

All other fields of CRI's messages are for Linux containers, and are dropped.
"""

from typing import Literal

from pydantic import Field

from virtbus.schemas.model import LenientModel

NODE_MODE = "NODE"
"""The namespace mode of a pod that shares a namespace of its node."""


class SandboxMetadata(LenientModel):
    """The identity of a sandbox. `uid` is the uid of the pod."""

    name: str = ""
    uid: str = ""
    namespace: str = ""
    attempt: int = 0


class PortMapping(LenientModel):
    """A port of the pod, and the node's port that leads to it. `host_port` 0 means no such port."""

    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    container_port: int = 0
    host_port: int = 0
    host_ip: str = ""


class NamespaceOptions(LenientModel):
    """The namespace modes of a pod."""

    network: str = "POD"


class SandboxSecurity(LenientModel):
    """The security context of a sandbox."""

    namespace_options: NamespaceOptions = NamespaceOptions()


class LinuxSandbox(LenientModel):
    """The Linux part of a sandbox's configuration."""

    security_context: SandboxSecurity = SandboxSecurity()


class SandboxDns(LenientModel):
    """CRI's `DNSConfig`, without its options, which DHCP cannot carry."""

    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()


class SandboxConfig(LenientModel):
    """CRI's `PodSandboxConfig`, the configuration of a sandbox."""

    metadata: SandboxMetadata = SandboxMetadata()
    hostname: str = ""
    log_directory: str = ""
    dns_config: SandboxDns = SandboxDns()
    port_mappings: tuple[PortMapping, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    linux: LinuxSandbox = LinuxSandbox()


class ContainerMetadata(LenientModel):
    """The identity of a container in its sandbox."""

    name: str = ""
    attempt: int = 0


class ImageSpec(LenientModel):
    """An image. `image` is the name in the pod's manifest or the id that PullImage returned."""

    image: str = ""
    annotations: dict[str, str] = Field(default_factory=dict)
    user_specified_image: str = ""

    @property
    def name(self) -> str:
        """Return the image name in the manifest; without it, return `image`."""
        return self.user_specified_image or self.image


class AuthConfig(LenientModel):
    """CRI's `AuthConfig`: a login for a registry, from imagePullSecrets. It is never stored."""

    username: str = Field("", repr=False)
    password: str = Field("", repr=False)
    auth: str = Field("", repr=False)
    server_address: str = ""
    identity_token: str = Field("", repr=False)
    registry_token: str = Field("", repr=False)


class KeyValue(LenientModel):
    """One environment variable."""

    key: str
    value: str = ""


class Mount(LenientModel):
    """A volume of the pod: a path of the node, and its path in the container.

    The fields with `exclude=True` are not in CRI's messages. virtbus-cri reads their values on the
    node.
    """

    container_path: str = ""
    host_path: str = ""
    readonly: bool = False
    is_file: bool = Field(False, exclude=True)
    """True if the node's path is a file."""
    is_folder: bool = Field(False, exclude=True)
    """True if the node's path is a folder."""
    memory: bool = Field(False, exclude=True)
    """True if the node's path is the mount point of a file system in memory."""
    options: dict[str, str] | None = Field(None, exclude=True)
    """The options of a flexvolume, as its driver wrote them; None for other volumes."""
    block_path: str = Field("", exclude=True)
    """The block device that the flexvolume's options name; empty if they name none."""
    assigned: tuple[str, str] | None = Field(None, exclude=True)
    """For a flexvolume that is a Ceph disk: the pool and the name of its volume on the bus."""
    permitted: bool = Field(False, exclude=True)
    """True if the node permits flexvolumes to use the device `block_path`."""


class Device(LenientModel):
    """A device of the node."""

    container_path: str = ""
    host_path: str = ""
    permissions: str = ""
    """Some of the letters `rwm` (read, write, mknod), as for cgroups."""
    block_path: str = Field("", exclude=True)
    """The block device at `host_path`; empty if the path is no block device. This field is not in
    CRI's messages: virtbus-cri reads the value on the node."""


class LinuxResources(LenientModel):
    """CRI's `LinuxContainerResources`. A limit of 0 means no limit."""

    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit_in_bytes: int = 0
    oom_score_adj: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""


class LinuxContainer(LenientModel):
    """The Linux part of a container's configuration."""

    resources: LinuxResources = LinuxResources()


class ContainerConfig(LenientModel):
    """CRI's `ContainerConfig`, the configuration of a container."""

    metadata: ContainerMetadata = ContainerMetadata()
    image: ImageSpec = ImageSpec()
    envs: tuple[KeyValue, ...] = ()
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Device, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    log_path: str = ""
    linux: LinuxContainer = LinuxContainer()

    def without_secrets(self) -> "ContainerConfig":
        """Return the configuration without the environment, which may have secrets."""
        return self.model_copy(update={"envs": ()})
