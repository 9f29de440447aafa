"""Computes a VMI's status from its VM."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from virtbus.kubebridge.core.objects.unstructured import NewCondition, Object, merged
from virtbus.kubebridge.core.runtime.controller import Refused
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.phases import phase_of
from virtbus.schemas.disk import Disk, target_names
from virtbus.schemas.guest import GuestInfo
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.network import InterfaceStatus, PlugState
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView

READY, PAUSED, AGENT = "Ready", "Paused", "AgentConnected"
FROZEN = "Frozen"
SYNCHRONIZED, LIVE_MIGRATABLE, POD_SCHEDULED = "Synchronized", "LiveMigratable", "PodScheduled"
ERR_IMAGE_PULL, IMAGE_PULL_BACKOFF = "ErrImagePull", "ImagePullBackOff"
TERMINATING = "PodTerminating"
"""Reason why a running guest is not ready: it is about to be stopped."""
NO_MIGRATION = "virtbus has no live migration yet"


class VmLister(Protocol):
    """The VMs of this cluster on the bus."""

    def get(self, uid: str) -> VmView | None:
        """Return the VM as it was last seen, or None."""

    def gone(self, uid: str) -> bool:
        """Return True if the VM is certainly gone."""

    def marked(self, uid: str) -> bool:
        """Return True if the VM is marked as orphaned."""

    def named(self, path: str) -> Collection[str]:
        """Return the uids of the VMs that have the `namespace/name`."""


class GuestAnswers(Protocol):
    """The last answers of the guest agents."""

    def get(self, uid: str) -> GuestInfo | None:
        """Return the last answer from the guest of this uid, or None."""

    def asked(self, uid: str) -> bool:
        """Return True once the guest was polled, with or without an answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The bridge's knowledge of a VMI's VM.

    `gone` is certain and permanent: the watch reported the VM's end, `vm.delete` answered 404, or
    `vm.create` answered 410. `refused` is the last refusal of `vm.create` or `vm.update`. `waits`
    is the reason why the create or the update cannot be sent.

    `guest` is the last answer of the guest agent. `asked` is False until the agent was polled.
    Until then, the VMI's status keeps its present guest information.
    """

    view: VmView | None = None
    gone: bool = False
    refused: Refused | None = None
    waits: str = ""
    guest: GuestInfo | None = None
    asked: bool = True


def status(vmi: Vmi, seen: Seen, now: datetime, retried: str = "") -> dict[str, Any]:
    """Return the whole status. `retried` is the time of the last retry of a failed start."""
    before, view = vmi.status, seen.view
    after = phase_of(vmi.phase, view, gone=seen.gone)
    kept = {key: value for key, value in before.items() if key not in _OURS}
    conditions, at = merged(_conditions(vmi, after, seen, retried), vmi.conditions, now)
    fields: dict[str, Any] = {
        **kept,
        "phase": str(after),
        "phaseTransitionTimestamps": _transitions(vmi, after, at),
        "conditions": conditions,
    }
    if view is None:
        return fields | {key: before[key] for key in _OF_VIEW if key in before}
    if view.node != UNPLACED:
        fields["nodeName"] = view.node
    fields["interfaces"] = [_interface(one, seen, vmi) for one in view.interfaces]
    fields["memory"] = dict.fromkeys(
        ("guestAtBoot", "guestCurrent", "guestRequested"), str(view.spec.domain.memory.guest)
    )
    fields["currentCPUTopology"] = view.spec.domain.cpu.model_dump(
        include={"sockets", "cores", "threads"}
    )
    if any(one.type == FROZEN and one.status for one in view.conditions):
        fields["fsFreezeStatus"] = "frozen"
    fields["guestOSInfo"] = guest_os(seen.guest) if seen.asked else vmi.guest_os
    return fields | described(vmi, view.spec.domain.devices.disks)


_OF_VIEW = (
    "nodeName",
    "interfaces",
    "memory",
    "currentCPUTopology",
    "guestOSInfo",
    "fsFreezeStatus",
    "machine",
    "qosClass",
    "volumeStatus",
)
_OURS = frozenset({"phase", "phaseTransitionTimestamps", "conditions", *_OF_VIEW})


def _transitions(vmi: Vmi, after: VmiPhase, now: str) -> list[Any]:
    """Return each phase with the time when the VMI first entered it. Metrics use these times."""
    there = list(vmi.status.get("phaseTransitionTimestamps") or ())
    if any(one.phase == after for one in vmi.transitions):
        return there
    return [*there, {"phase": str(after), "phaseTransitionTimestamp": now}]


# --- conditions --------------------------------------------------------------------------------
def _conditions(vmi: Vmi, after: VmiPhase, seen: Seen, retried: str) -> list[NewCondition]:
    view = seen.view
    runs = view is not None and view.state is VmState.RUNNING and after not in FINAL
    ready = runs and not vmi.deleting
    reason, message = ("", "") if ready else _not_ready(view, runs=runs)
    conditions = [
        NewCondition(READY, ready, reason, message),
        NewCondition(
            LIVE_MIGRATABLE, on=False, reason="DisksNotLiveMigratable", message=NO_MIGRATION
        ),
    ]
    if after not in FINAL:
        conditions += _troubles(seen, retried)
    if view is not None and view.state is VmState.PAUSED:
        paused = next((one for one in view.conditions if one.type == PAUSED), None)
        reason = (paused.reason if paused else "") or "PausedByUser"
        message = (paused.message if paused else "") or "VMI was paused by user"
        conditions.append(NewCondition(PAUSED, on=True, reason=reason, message=message))
    if runs and (seen.guest is not None if seen.asked else holds(vmi, AGENT)):
        conditions.append(NewCondition(AGENT, on=True))
    return conditions


def _not_ready(view: VmView | None, *, runs: bool) -> tuple[str, str]:
    if runs:
        return TERMINATING, "the guest is shut down"
    if view is None or view.node == UNPLACED:
        return "PodNotExists", (view.message if view else "") or "it has no node yet"
    return "GuestNotRunning", view.message or "Guest VM is not reported as running"


def _troubles(seen: Seen, retried: str) -> Iterator[NewCondition]:
    view = seen.view
    if seen.waits or seen.refused is not None:
        message = seen.waits or (seen.refused.message if seen.refused else "")
        reason = "FailedCreate" if view is None else "FailedUpdate"
        yield NewCondition(SYNCHRONIZED, on=False, reason=reason, message=message)
    elif view is not None and view.reason == "unplaced":
        yield NewCondition(POD_SCHEDULED, on=False, reason="Unschedulable", message=view.message)
    elif view is not None and view.reason and view.state is not VmState.RUNNING:
        reason = "FailedStart"
        stopped = view.state in {VmState.FAILED, VmState.PREPARING}
        if stopped and view.failure_stage == "image":
            reason = IMAGE_PULL_BACKOFF if retried else ERR_IMAGE_PULL
        yield NewCondition(SYNCHRONIZED, False, reason, view.message, retried)


# --- guest information -------------------------------------------------------------------------
def _interface(one: InterfaceStatus, seen: Seen, vmi: Vmi) -> dict[str, Any]:
    guest = seen.guest
    before: Object = next((nic for nic in vmi.interfaces if nic.get("mac") == one.mac), {})
    if not seen.asked and "interfaceName" in before:
        return dict(before)
    inside = next((nic for nic in guest.interfaces if nic.mac == one.mac), None) if guest else None
    # virtbus assigned the first addresses, so they are certain. The addresses that a guest reports
    # behind NAT are unreachable, so they are left out.
    own = inside.addresses if inside and one.binding != NicBinding.MASQUERADE else ()
    reported = (*one.addresses, *own)
    addresses = list(dict.fromkeys(address.partition("/")[0] for address in reported))
    fields: dict[str, Any] = {
        "name": one.name,
        "mac": one.mac,
        "infoSource": _sources(one, vmi, inside=inside is not None),
        "linkState": str(one.state),
        "queueCount": one.queues,
    }
    if addresses:
        fields |= {"ipAddress": addresses[0], "ipAddresses": addresses}
    if inside:
        fields["interfaceName"] = inside.name
    return fields


def _sources(one: InterfaceStatus, vmi: Vmi, *, inside: bool) -> str:
    """Return the sources of an interface's status, in KubeVirt's words.

    `domain` is a source once the guest has the device. `multus-status` is a source of a Multus
    network.
    """
    multus = any(net.multus for net in vmi.networks if net.name == one.name)
    named = {
        "domain": one.plug is not PlugState.WAITING,
        "guest-agent": inside,
        "multus-status": multus,
    }
    return ", ".join(name for name, holds_ in named.items() if holds_)


def guest_os(guest: GuestInfo | None) -> dict[str, str]:
    """Return the guest's operating system under KubeVirt's names; empty without an agent."""
    if guest is None or guest.os is None:
        return {}
    os = guest.os
    fields = {
        "name": os.name,
        "id": os.id,
        "prettyName": os.pretty_name,
        "version": os.version,
        "versionId": os.version_id,
        "kernelRelease": os.kernel_release,
        "kernelVersion": os.kernel_version,
        "machine": os.machine,
    }
    return {key: value for key, value in fields.items() if value}


def holds(vmi: Vmi, kind: str, *, on: bool = True, reason: str = "") -> bool:
    """Return True if the VMI's condition `kind` has the status `on` and, if given, the reason."""
    return any(
        one.type == kind and one.status == str(on) and reason in {"", one.reason}
        for one in vmi.conditions
    )


MACHINE = "q35"
"""The machine type of a VMI that names none."""


def described(vmi: Vmi, disks: tuple[Disk, ...]) -> dict[str, Any]:
    """Return the status of machine, QoS and disks.

    The machine type `q35` has no version here, because the node's QEMU decides the version.
    """
    return {
        "machine": {"type": vmi.machine or MACHINE},
        "qosClass": qos_class(vmi),
        "volumeStatus": volume_status(disks),
    }


def qos_class(vmi: Vmi) -> str:
    """Return the QoS class. A guest always requests memory, so its class is never BestEffort."""
    equal = all(
        name in vmi.limits and vmi.requests.get(name, vmi.limits[name]) == vmi.limits[name]
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if equal else "Burstable"


def volume_status(disks: tuple[Disk, ...]) -> list[dict[str, Any]]:
    """Return the disks, sorted by name. `target` is the name of the disk in the guest."""
    pairs = zip(disks, target_names(disks), strict=True)
    volumes = [{"name": disk.name, "target": target} for disk, target in pairs]
    return sorted(volumes, key=lambda one: one["name"])
