"""Lists every subject of the bus with its kind, its messages, its senders and its receivers.

The permissions of the NATS users, docs/reference/subjects.md and asyncapi.yaml are generated from
it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from virtbus.schemas import (
    api,
    events,
    guest,
    history,
    host_api,
    hosts,
    image,
    image_api,
    lease,
    node,
    node_rpc,
    paging,
    storage,
    streams,
    subjects,
    vm,
)
from virtbus.schemas import quarantine as qt
from virtbus.schemas.channel_parameters import ASKERS, template
from virtbus.schemas.vm_status import VmStatus, VmView


class Plane(StrEnum):
    """The kind of use of a subject."""

    REQUEST = "request"
    """One request, one answer."""
    STREAM = "stream of replies"
    """One request, many answers on its inbox."""
    CORE = "core message"
    """Published without an answer; may be lost."""
    RECORD = "record"
    """The last value of a key in a key-value bucket."""
    FACT = "fact"
    """A message that a stream keeps."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One subject. `message` None: a plain map; `reply` None: no reply.

    `function` names the function of `virtbus.schemas.subjects` that returns the subject.
    """

    id: str
    subject: str
    plane: Plane
    message: type[BaseModel] | None
    reply: type[BaseModel] | None
    sender: str
    receiver: str
    about: str
    function: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names in braces in the subject, in order."""
        return tuple(re.findall(r"\{(\w+)\}", self.subject))

    @property
    def enveloped(self) -> bool:
        """Return True if messages have an envelope. Records do not (ADR 0002)."""
        return self.plane is not Plane.RECORD


def _api(
    resource: str, verb: str, want: type[BaseModel], give: type[BaseModel] | None, about: str
) -> Channel:
    plane = Plane.STREAM if verb == "watch" else Plane.REQUEST
    return Channel(
        id=f"{resource}.{verb}",
        subject=template(subjects.api, resource=resource, verb=verb),
        plane=plane,
        message=want,
        reply=give,
        sender="client",
        receiver="controller",
        about=about,
        function="api",
    )


def _rpc(
    service: str, verb: str, want: type[BaseModel], give: type[BaseModel], about: str
) -> Channel:
    streamed = give is streams.StreamData
    return Channel(
        id=f"{service}.{verb}",
        subject=template(subjects.rpc, service=service, verb=verb),
        plane=Plane.STREAM if streamed else Plane.REQUEST,
        message=want,
        reply=give,
        sender="client" if streamed else ASKERS.get(verb, "nodeagent"),
        receiver="nodeagent" if service == "agent" else service,
        about=about,
        function="rpc",
    )


def _said(
    make: Callable[..., str], plane: Plane, model: type[BaseModel] | None, who: str, about: str
) -> Channel:
    name = make.__name__
    sender, _, receiver = who.partition(" → ")
    return Channel(
        name.replace("_", "."), template(make), plane, model, None, sender, receiver, about, name
    )


def _ready(part: str, model: type[BaseModel], service: str, about: str) -> Channel:
    subject = template(subjects.ready, part=part)
    return Channel(
        f"ready.{part}", subject, Plane.CORE, model, None, service, "nodeagent", about, "ready"
    )


CHANNELS: tuple[Channel, ...] = (
    _api("vm", "create", api.VmCreate, api.VmCreated, "Make a VM; safe to repeat with its uid."),
    _api("vm", "get", api.VmRef, VmView, "One VM."),
    _api("vm", "list", api.VmList, api.VmPage, "VMs by namespace and labels, in pages."),
    _api("vm", "watch", api.VmWatch, api.WatchReply, "A list, then each change."),
    _api("vm", "update", api.VmUpdate, VmView, "Change a VM over the revision that was read."),
    _api("vm", "delete", api.VmDelete, VmView, "Remove a VM and its disks."),
    _api("vm", "start", api.VmStart, VmView, "Start the guest."),
    _api("vm", "stop", api.VmStop, VmView, "Shut the guest down."),
    _api("vm", "restart", api.VmRestart, VmView, "End the guest and start it again."),
    _api("vm", "pause", api.VmRef, VmView, "Stop the guest's CPUs."),
    _api("vm", "unpause", api.VmRef, VmView, "Resume a paused guest."),
    _api("vm", "reset", api.VmCommand, VmView, "Press the guest's reset button."),
    _api("vm", "soft-reboot", api.VmCommand, VmView, "Ask the guest to reboot."),
    _api("vm", "freeze", api.VmFreeze, VmView, "Freeze the guest's file systems for a time."),
    _api("vm", "thaw", api.VmCommand, VmView, "Thaw the guest's file systems."),
    _api("vm", "move", api.VmMove, VmView, "Stop a VM and start it on another node."),
    _api("vm", "events", history.EventList, history.EventPage, "Stored events of a VM, or of all."),
    _api("node", "list", paging.PageAsk, api.NodePage, "The nodes, with their allocations."),
    _api("node", "get", api.NodeRef, api.NodeDetail, "One node, its desired state and VMs."),
    _api("node", "cordon", api.NodeRef, api.NodeDetail, "Place no new VM on a node."),
    _api("node", "uncordon", api.NodeRef, api.NodeDetail, "Open it for VMs; ends a drain."),
    _api("node", "drain", api.NodeDrain, api.NodeDetail, "Cordon and evacuate it."),
    _api("node", "fence", api.NodeFence, api.NodeDetail, "Confirm that a node is off."),
    _api("node", "unfence", api.NodeRef, api.NodeDetail, "End a node's fence."),
    _api("node", "forget", api.NodeRef, api.NodeForgotten, "Forget a lost node."),
    _api("node", "takeover", host_api.NodeTakeover, api.NodeDetail, "Give a node to a host."),
    _api("node", "approve", host_api.NodeApprove, api.NodeDetail, "Approve labels and size."),
    _api("node", "audit", api.NodeAudit, api.NodeAudited, "Compare hosts; repair."),
    _api("node", "quarantine", qt.NodeQuarantine, qt.NodeQuarantined, "Disks without a record."),
    _api("image", "list", image_api.ImageList, image_api.ImagePage, "The images of the fleet."),
    _api("image", "pull", image_api.ImagePull, image_api.PulledImages, "Fetch an image."),
    _api(
        "image",
        "delete",
        image_api.ImageDelete,
        image_api.DeletedImages,
        "Remove an image from nodes.",
    ),
    _api("network", "list", paging.PageAsk, api.NetworkPage, "The networks that nodes offer."),
    _api("bus", "rebuild", api.BusRebuild, api.BusRebuilt, "Restore records from hosts."),
    _api("bus", "status", api.Empty, api.BusStatus, "Streams, nodes and VMs in figures."),
    _said(
        subjects.watch_renewal, Plane.CORE, api.Empty, "client → controller", "Keep a watch alive."
    ),
    _said(
        subjects.vm_record,
        Plane.RECORD,
        vm.VmRecord,
        "controller → the node's services",
        "The desired VM and its assignment; the write that accepts a create.",
    ),
    Channel(
        "vm.tombstone",
        template(subjects.vm_record, node="_"),
        Plane.RECORD,
        vm.Tombstone,
        None,
        "controller",
        "controller",
        "A mark that keeps an interrupted create from committing its uid.",
        "vm_record",
    ),
    _said(
        subjects.name_claim,
        Plane.RECORD,
        vm.NameClaim,
        "controller → controller",
        "The uid that has a name.",
    ),
    _said(
        subjects.join_nonce,
        Plane.RECORD,
        vm.JoinNonce,
        "admin → nodeagent",
        "The bus incarnation that the node joined.",
    ),
    _said(
        subjects.node_spec,
        Plane.RECORD,
        node.NodeSpec,
        "controller → controller, nodeagent",
        "Cordon, drain and fence of a node.",
    ),
    _said(
        subjects.node_host,
        Plane.RECORD,
        hosts.HostRecord,
        "controller → controller, nodeagent",
        "The node's host, and its approved labels and size.",
    ),
    _said(
        subjects.node_hosts,
        Plane.RECORD,
        node.HostAddresses,
        "controller → controller, netd",
        "Addresses of the fleet's hosts, which guests of the node may not reach.",
    ),
    _said(
        subjects.node_reserved,
        Plane.RECORD,
        node.Reserved,
        "controller → controller",
        "The sum of strict VMs on a node; changes in one batch with their records.",
    ),
    _said(
        subjects.vm_secret,
        Plane.RECORD,
        vm.VmSecrets,
        "controller → the node's services",
        "User-data and network-data of a VM.",
    ),
    _said(
        subjects.signing_key,
        Plane.RECORD,
        hosts.SigningKey,
        "controller → controller",
        "A key by which controllers sign records.",
    ),
    _said(
        subjects.vm_status,
        Plane.RECORD,
        VmStatus,
        "nodeagent → controller",
        "The observed state of a VM.",
    ),
    _said(
        subjects.node_instance,
        Plane.RECORD,
        hosts.Instance,
        "nodeagent → the node's services, controller",
        "The one agent that acts for the node; held by compare-and-set.",
    ),
    _said(
        subjects.node_rival,
        Plane.RECORD,
        hosts.Instance,
        "nodeagent → controller",
        "An agent of the same id that was refused; TTL 60 s.",
    ),
    _said(
        subjects.node_images,
        Plane.RECORD,
        node.NodeImages,
        "nodeagent → controller",
        "Keys of the node's images.",
    ),
    _said(
        subjects.node_record,
        Plane.RECORD,
        node.NodeRecord,
        "nodeagent → controller",
        "The heartbeat, with capacity; TTL 15 s.",
    ),
    _said(
        subjects.storage_probe,
        Plane.RECORD,
        None,
        "controller, virtbus up → the bus",
        "A purge that tests whether the bus stores messages again; removed after a second.",
    ),
    _said(
        subjects.lease,
        Plane.RECORD,
        lease.Lease,
        "its holder → its rivals",
        "A singleton's lease; its revision is the fencing token.",
    ),
    _ready("image", node_rpc.ImageReady, "imaged", "A VM's disks exist, or the failure."),
    _ready("net", node_rpc.NetReady, "netd", "A VM's interfaces exist, or the failure."),
    _rpc("imaged", "ensure", node_rpc.Ensure, node_rpc.ImageReady, "Make the disks of a record."),
    _rpc("imaged", "release", node_rpc.Release, node_rpc.ReleaseReply, "Remove a VM's disks."),
    _rpc("imaged", "inspect", node_rpc.Inspect, node_rpc.HeldResources, "Disk files on the host."),
    _rpc("imaged", "list", node_rpc.ListImages, node_rpc.HeldImages, "Images of the node."),
    _rpc("imaged", "pull", node_rpc.PullImage, image.ImageInfo, "Fetch an image."),
    _rpc("imaged", "delete", node_rpc.ForgetImage, node_rpc.ForgottenImage, "Remove an image."),
    _rpc("imaged", "quarantine", qt.QuarantineWork, qt.Quarantine, "Disks without a record."),
    _rpc("netd", "ensure", node_rpc.Ensure, node_rpc.NetReady, "Make the network of a record."),
    _rpc("netd", "release", node_rpc.Release, node_rpc.ReleaseReply, "Remove a VM's network."),
    _rpc("netd", "inspect", node_rpc.Inspect, node_rpc.HeldResources, "Networks on the host."),
    _rpc("agent", "inspect", node_rpc.Inspect, node_rpc.HeldResources, "VMs, with phases."),
    _rpc("agent", "records", node_rpc.RecordsRead, node_rpc.KnownRecords, "Records on the host."),
    _rpc("agent", "audit", node_rpc.Audit, node_rpc.Audited, "Compare host and records."),
    _rpc("agent", "quarantine", qt.QuarantineAsk, qt.Quarantine, "Disks without a record."),
    _rpc("agent", "join", node_rpc.JoinBus, node_rpc.JoinedBus, "Follow a rebuilt bus."),
    _rpc("agent", "guest", guest.GuestAsk, guest.GuestInfo, "Data of the guest agent."),
    _rpc("agent", "command", node_rpc.GuestCommand, api.Empty, "Reset or reboot a guest, once."),
    _rpc("agent", "freeze", node_rpc.GuestFreeze, api.Empty, "Freeze or thaw a guest."),
    _rpc("agent", "console", streams.ConsoleOpen, streams.StreamData, "A serial console."),
    _rpc("agent", "logs", streams.LogsRead, streams.StreamData, "A console's log."),
    _rpc("agent", "port", streams.PortOpen, streams.StreamData, "A port of a guest."),
    _rpc("agent", "vnc", streams.StreamOpen, streams.StreamData, "A display, as RFB."),
    _rpc("agent", "screenshot", streams.StreamOpen, streams.StreamData, "A display, as PNG."),
    _said(
        subjects.stream_input,
        Plane.CORE,
        streams.StreamData,
        "client → nodeagent",
        "Data from a stream's client; a message without `data` is a keep-alive.",
    ),
    _said(subjects.progress, Plane.CORE, image.Progress, "imaged → client", "Progress of a pull."),
    _said(
        subjects.service_report,
        Plane.CORE,
        node_rpc.ServiceReport,
        "imaged, netd → nodeagent",
        "The report of a node's service, every 4 s and after changes.",
    ),
    _said(
        subjects.client_span,
        Plane.CORE,
        events.Span,
        "client → controller",
        "A client's own span of a request.",
    ),
    _said(
        subjects.bus_storage,
        Plane.CORE,
        storage.BusStorage,
        "`virtbus up` → controller",
        "Free space on the bus's disk, and whether the server still stores messages.",
    ),
    _said(
        subjects.event,
        Plane.FACT,
        events.Event,
        "any service → people, bridges, tests",
        "One step of a VM's life; kept 72 h.",
    ),
    _said(
        subjects.node_event,
        Plane.FACT,
        events.Event,
        "controller → people, bridges, tests",
        "A node became ready, suspect, down or left; kept 72 h.",
    ),
    Channel(
        "event.span",
        template(subjects.event, kind="trace.span"),
        Plane.FACT,
        events.SpanBatch,
        None,
        "any service",
        "`virtbus vm trace`",
        "Spans of a VM's trace that ended together.",
        "event",
    ),
    _said(
        subjects.dead_letter,
        Plane.FACT,
        events.DeadLetter,
        "any service → people",
        "A message that could not be handled, with the reason.",
    ),
)

FILTERS: tuple[tuple[str, str], ...] = (
    (template(subjects.vm_anywhere), "one uid on any node: record, tombstone or purge marker"),
    (template(subjects.vm_all), "every record, tombstone, join nonce and claim"),
    (template(subjects.signing_keys), "the keys that sign records"),
    (template(subjects.watch_renewals), "renewals of a controller's watches"),
    (template(subjects.hosts_all), "the addresses of hosts, one key per node"),
    (template(subjects.ready_all), "ready events of a node"),
    (template(subjects.service_report_all), "telemetry of a node"),
    (template(subjects.events), "events of one VM"),
)
