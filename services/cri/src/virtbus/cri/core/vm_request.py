"""Translates a pod and its container to the VM of the pod: the request `vm.create`.

Parts of a pod that a VM cannot have are refused here, before virtbus-cri changes anything.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from virtbus.cri.core import (
    pod_directories,
    pod_disks,
    pod_dns,
    pod_networks,
    pod_resources,
    pod_volumes,
    virtlet,
)
from virtbus.cri.core.configs import (
    NODE_MODE,
    ContainerConfig,
    PortMapping,
    SandboxConfig,
)
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.core.pod import Machine, Pod, ShellKey
from virtbus.cri.core.pod_directories import PodDirectory
from virtbus.cri.core.pod_disks import PodDisk
from virtbus.cri.core.pod_dns import Hosts
from virtbus.cri.core.virtlet import Wishes
from virtbus.cri.core.virtlet_sources import Contents
from virtbus.schemas.api import VmCreate
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.guest_files import GuestFile
from virtbus.schemas.ids import is_id
from virtbus.schemas.network import NetworkState
from virtbus.schemas.pod import POD_NAME, POD_NAMESPACE, POD_UID
from virtbus.schemas.publish import EVERY_ADDRESS, EVERY_ADDRESS6, PublishedPort
from virtbus.schemas.seed import CloudInitConfigDrive, CloudInitNoCloud
from virtbus.schemas.vm import (
    Cpu,
    Devices,
    Disk,
    Domain,
    EvictionStrategy,
    Firmware,
    ImageVolume,
    Interface,
    Memory,
    RunStrategy,
    VmSpec,
    Volume,
)
from virtbus.schemas.volume_ref import HostDevice
from virtbus.schemas.wire import invalid, problems

CONTAINER_NAME = "io.kubernetes.container.name"
ATTEMPT = "virtbus.io/cri-attempt"
"""A VM with a container has the labels CONTAINER_NAME and ATTEMPT, and those of `_pod_labels`."""

HOSTNAME = "kubernetes.io/hostname"
_EVERY = frozenset({"", EVERY_ADDRESS, EVERY_ADDRESS6})
ROOT, SEED = "root", "cloudinit"
ROOT_LOGIN = "#cloud-config\ndisable_root: false\n"
"""Vendor data that permits root logins, which exec needs. The pod's user data can forbid them."""
_NOT_OF_A_LABEL = re.compile(r"[^A-Za-z0-9._-]")
_NAME_CHARS = 50
_LABEL_CHARS = 63


class Inside(NamedTuple):
    """The data for the guest's seed: the pod's key, annotations, files, host aliases and mounts."""

    key: ShellKey
    wanted: Wishes
    files: tuple[GuestFile, ...]
    hosts: Hosts = Hosts()
    disks: tuple[PodDisk, ...] = ()
    directories: tuple[PodDirectory, ...] = ()


class Read(NamedTuple):
    """Contents that were read for a pod: files, objects named by annotations, and host aliases."""

    files: tuple[GuestFile, ...] = ()
    contents: Contents = {}  # noqa: RUF012  never changed
    hosts: Hosts = Hosts()


class Place(NamedTuple):
    """The node's label `kubernetes.io/hostname`, and the node's settings for VMs of pods."""

    hostname: str
    network: str
    empty_dir_bytes: int = 10 * 1024**3
    """The size of an emptyDir without a size in the pod's annotation."""


NOTHING = Read()


def check_sandbox(config: SandboxConfig) -> None:
    """Refuse a sandbox that cannot be a VM.

    Raises:
        VirtbusError: 400 `pod_refused`, with all problems.
    """
    found: list[Detail] = []
    metadata = config.metadata
    if not metadata.name or not metadata.uid or not is_id(metadata.namespace):
        found.append(Detail(path="metadata", message="a pod needs a name, a uid and a namespace"))
    if config.linux.security_context.namespace_options.network == NODE_MODE:
        message = "a VM has a network of its own; remove hostNetwork from the pod"
        found.append(Detail(path="linux.security_context", message=message))
    found += _port_problems(config.port_mappings)
    found += virtlet.wishes(config.annotations)[1]
    found += pod_disks.sizes(config.annotations)[1]
    found += pod_resources.memory_max(config.annotations)[1]
    found += pod_dns.problems(config)
    found += pod_networks.problems(config.annotations)
    _refuse(found)


def sandbox_request(pod: Pod, sandbox: SandboxConfig, place: Place) -> VmCreate:
    """Return the request for a VM without disks, which only holds the pod's network."""
    machine = pod.machine
    assert machine is not None, "the machine is stored before its VM is requested"  # noqa: S101
    wanted = virtlet.wishes(sandbox.annotations)[0]
    return VmCreate(
        name=machine.name,
        namespace=sandbox.metadata.namespace,
        uid=machine.uid,
        labels=_pod_labels(sandbox),
        annotations=_annotations(sandbox),
        spec=VmSpec(
            domain=Domain(
                devices=Devices(interfaces=_interfaces(sandbox, place)),
                firmware=Firmware(uuid=wanted.system_uuid),
            ),
            volumes=(),
            **_of_pod(sandbox, place),
        ),
    )


def _annotations(sandbox: SandboxConfig) -> dict[str, str]:
    return {POD_NAME: sandbox.metadata.name, POD_UID: sandbox.metadata.uid}


def _interfaces(sandbox: SandboxConfig, place: Place) -> tuple[Interface, ...]:
    wanted = pod_networks.pod_networks(sandbox.annotations, place.network)
    return pod_networks.interfaces(wanted, _published(sandbox.port_mappings))


def _of_pod(sandbox: SandboxConfig, place: Place) -> dict[str, Any]:
    """Return the fields of the spec that are the same before and after the container's create."""
    wanted = pod_networks.pod_networks(sandbox.annotations, place.network)
    return {
        "run_strategy": RunStrategy.MANUAL,
        "network_state": NetworkState.HELD,
        "networks": pod_networks.networks(wanted),
        "dns_config": pod_dns.dns_config(sandbox),
        "node_selector": {HOSTNAME: place.hostname},
        "eviction_strategy": EvictionStrategy.EXTERNAL,
    }


def create_request(
    pod: Pod,
    sandbox: SandboxConfig,
    config: ContainerConfig,
    image: PulledImage,
    place: Place,
    read: Read = NOTHING,
) -> VmCreate:
    """Return the request for the pod's VM, which is created powered off.

    Raises:
        VirtbusError: 400 with all parts of the pod that a VM cannot have.
    """
    check_container(config)
    wanted, wrong = virtlet.wishes(sandbox.annotations, read.contents)
    _refuse(wrong)
    machine = pod.machine
    assert machine is not None, "the machine is stored before its VM is requested"  # noqa: S101
    inside = Inside(machine.key, wanted, read.files, read.hosts)
    try:
        return VmCreate(
            name=machine.name,
            namespace=sandbox.metadata.namespace,
            uid=machine.uid,
            labels=labels(sandbox, config),
            annotations=_annotations(sandbox),
            spec=_spec(sandbox, config, image, place, inside),
        )
    except ValidationError as error:
        raise invalid(problems(error, model=VmCreate)) from None


def check_container(config: ContainerConfig) -> None:
    """Refuse a container that cannot be a guest.

    Raises VirtbusError 400 `pod_refused`.
    """
    found: list[Detail] = []
    if not config.metadata.name:
        found.append(Detail(path="metadata.name", message="a container needs a name"))
    found += pod_volumes.refusals(config.mounts, config.devices)
    found += pod_disks.problems(config)
    found += pod_directories.problems(config)
    found += pod_resources.problems(config.linux.resources)
    _refuse(found)


def _refuse(found: list[Detail]) -> None:
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        message = f"{found[0].message}{more}"
        raise VirtbusError(Code.INVALID, "pod_refused", message, details=tuple(found))


def refuse_second(pod: Pod, name: str) -> None:
    """Refuse a second container, such as an init container or a sidecar.

    Raises:
        VirtbusError: 400 `second_container`.
    """
    other = next((one.name for one in pod.containers if one.name != name), None)
    if other is not None:
        message = (
            f"a VM pod has one container, and this one has {other!r:.100} and {name!r:.100}; "
            "remove the others, also initContainers and sidecars"
        )
        raise VirtbusError(Code.INVALID, "second_container", message)


def vm_name(pod_name: str, uid: str) -> str:
    """Return a VM's name: the pod's name, and the end of the VM's uid.

    The uid makes the name unique: the next pod of the same name may begin before this VM is gone.
    """
    plain = re.sub(r"[^a-z0-9-]", "-", pod_name.lower())[:_NAME_CHARS].strip("-") or "pod"
    return f"{plain}-{uid[-12:]}"


def labels(sandbox: SandboxConfig, config: ContainerConfig) -> dict[str, str]:
    """Return the VM's labels for this attempt of the container."""
    return {
        **_pod_labels(sandbox),
        CONTAINER_NAME: label_value(config.metadata.name),
        ATTEMPT: str(config.metadata.attempt),
    }


def _pod_labels(sandbox: SandboxConfig) -> dict[str, str]:
    metadata = sandbox.metadata
    return {
        POD_NAME: label_value(metadata.name),
        POD_NAMESPACE: label_value(metadata.namespace),
        POD_UID: label_value(metadata.uid),
    }


def label_value(text: str) -> str:
    """Return `text` if it is a valid label value; otherwise return a part of it with a hash."""
    plain = _NOT_OF_A_LABEL.sub("_", text).strip("._-")
    if plain == text and len(text) <= _LABEL_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    head = plain[: _LABEL_CHARS - 13]
    return f"{head}-{digest}" if head else digest


def _spec(
    sandbox: SandboxConfig,
    config: ContainerConfig,
    image: PulledImage,
    place: Place,
    inside: Inside,
) -> VmSpec:
    wanted = inside.wanted
    bus = wanted.disk_bus
    more = pod_disks.disks(config, sandbox.annotations, place.empty_dir_bytes)
    shared = pod_directories.directories(config)
    return VmSpec(
        domain=Domain(
            cpu=Cpu(
                **pod_resources.topology(config.linux.resources, wanted),
                model=wanted.cpu_model,
                features=wanted.cpu_features,
            ),
            memory=Memory(
                guest=pod_resources.memory_bytes(config.linux.resources, sandbox.annotations)
            ),
            resources=pod_resources.limits(config.linux.resources),
            devices=Devices(
                disks=(
                    Disk(name=ROOT, bus=bus),
                    Disk(name=SEED, bus=bus, readonly=True),
                    *(Disk(name=one.name, bus=bus, readonly=one.readonly) for one in more),
                ),
                interfaces=_interfaces(sandbox, place),
                filesystems=tuple(one.filesystem for one in shared),
            ),
            firmware=Firmware(uuid=wanted.system_uuid),
        ),
        volumes=(
            _root(config, image, wanted),
            _seed(sandbox, config, inside._replace(disks=more, directories=shared)),
            *(one.volume for one in more),
        ),
        **_of_pod(sandbox, place),
    )


def _root(config: ContainerConfig, image: PulledImage, wanted: Wishes) -> Volume:
    """Return the root disk: a block device, to which the image is copied, or a new disk."""
    if device := pod_disks.root_device(config):
        return Volume(name=ROOT, host_device=HostDevice(path=device, image=image.ref))
    size_bytes = wanted.root_bytes if wanted.root_bytes > image.virtual_bytes else None
    return Volume(name=ROOT, image=ImageVolume(ref=image.ref, size=size_bytes))


def _seed(sandbox: SandboxConfig, config: ContainerConfig, inside: Inside) -> Volume:
    wanted = inside.wanted
    values = {
        **pod_dns.names(sandbox, wanted.hostname, inside.hosts),
        "environment": {pair.key: pair.value for pair in config.envs},
        "user_data": wanted.user_data,
        "meta_data": wanted.meta_data,
        "ssh_keys": (*wanted.ssh_keys, *filter(None, [inside.key.public])),
        "vendor_data": ROOT_LOGIN if inside.key.public else None,
        "write_files": (*inside.files, *wanted.files),
        "mounts": (
            *(mount for one in inside.disks for mount in one.mounts),
            *(mount for one in inside.directories for mount in one.mounts),
        ),
        "host_aliases": inside.hosts.aliases,
        "links": tuple(link for one in inside.disks for link in one.links),
    }
    if wanted.config_drive:
        drive = CloudInitConfigDrive.model_validate(values)
        return Volume(name=SEED, cloud_init_config_drive=drive)
    return Volume(name=SEED, cloud_init_no_cloud=CloudInitNoCloud.model_validate(values))


def restarted(spec: VmSpec, sandbox: SandboxConfig, config: ContainerConfig) -> VmSpec:
    """Return a VM's spec with the CPUs, memory, limits and DNS settings of the next attempt.

    A later sandbox of the pod may have other DNS settings.
    """
    resources, before = config.linux.resources, spec.domain
    counts = pod_resources.topology(resources, virtlet.wishes(sandbox.annotations)[0])
    domain = before.model_copy(
        update={
            "cpu": before.cpu.model_copy(update=counts),
            "memory": Memory(guest=pod_resources.memory_bytes(resources, sandbox.annotations)),
            "resources": pod_resources.limits(resources),
        }
    )
    dns_config = pod_dns.dns_config(sandbox)
    return spec.model_copy(update={"domain": domain, "dns_config": dns_config})


def _port_problems(ports: tuple[PortMapping, ...]) -> Iterator[Detail]:
    for index, port in enumerate(ports):
        if port.host_port and port.protocol == "SCTP":
            message = "a hostPort of SCTP cannot lead to a VM; use TCP or UDP"
            yield Detail(path=f"port_mappings[{index}]", message=message)


def _published(ports: tuple[PortMapping, ...]) -> tuple[PublishedPort, ...]:
    return tuple(
        PublishedPort(
            host_port=port.host_port,
            guest_port=port.container_port,
            protocol="udp" if port.protocol == "UDP" else "tcp",
            host_address=None if port.host_ip in _EVERY else port.host_ip,
        )
        for port in ports
        if port.host_port
    )


def new_machine(sandbox: SandboxConfig, uid: str, key: ShellKey) -> Machine:
    """Return the Machine of a pod before the create of its VM."""
    name = vm_name(sandbox.metadata.name, uid)
    return Machine(uid=uid, name=name, key=key, network="Held", network_generation=1)


def keeps_root(machine: Machine, config: ContainerConfig, image: PulledImage) -> bool:
    """Return True if the VM has its disks, and was made from this image.

    An equal image name in the manifest is enough, even if a tag means another digest by now.
    """
    same = image.digest == machine.image_id or config.image.name == machine.image_name
    return machine.made and same
