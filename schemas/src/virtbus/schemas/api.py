"""Requests and answers of the public API about VMs, nodes, offered networks and the bus."""

from typing import Annotated

from pydantic import Field, StringConstraints

from virtbus.schemas.audit import AuditFinding
from virtbus.schemas.base64_text import FILE_CHARACTERS
from virtbus.schemas.errors import Detail
from virtbus.schemas.group_rebuild import RebuiltGroup
from virtbus.schemas.ids import HostGroup, Id, Uid, UnsignedRecord
from virtbus.schemas.image import ImageRef
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.network import NetworkInfo
from virtbus.schemas.node import NodeView
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Bytes, Count
from virtbus.schemas.seed import SshKey
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import (
    CORES_MAX,
    DISK_MAX,
    DISK_MIN,
    MEMORY_MAX,
    MEMORY_MIN,
    Annotations,
    Labels,
    VmSpec,
)
from virtbus.schemas.vm_status import VmView

VolumeName = Annotated[str, StringConstraints(max_length=127, pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")]


class VmCreate(StrictModel):
    """`vm.create`. The shorthand fields (`image`, `cpus`, …) complete `spec`.

    Without `uid` the server generates one. Send your own UUID to make the request repeatable: a
    repeat with the same uid and spec returns the existing VM.
    """

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None
    labels: Labels = Field(default_factory=dict)
    annotations: Annotations = Field(default_factory=dict)
    spec: VmSpec | None = None
    image: ImageRef | None = None
    disk: Bytes | None = Field(
        None,
        ge=DISK_MIN,
        le=DISK_MAX,
        description="size of the root disk; default the image's own",
    )
    cpus: Count | None = Field(None, ge=1, le=CORES_MAX)
    memory: Bytes | None = Field(None, ge=MEMORY_MIN, le=MEMORY_MAX)
    ssh_keys: tuple[SshKey, ...] = Field((), max_length=64)
    user_data: str | None = Field(None, max_length=FILE_CHARACTERS)
    network: Id | None = None
    origin: Id | None = None
    """A snapshot of a VM in the same namespace. Each disk of the new VM starts from the snapshot's
    disk of the same name, on the snapshot's node. First-boot data that the request leaves out comes
    from the snapshot's VM. The new VM has an identity of its own."""


class VmRef(StrictModel):
    """A reference to a VM: `uid`, or `name` in `namespace`."""

    uid: Uid | None = None
    name: Id | None = None
    namespace: Id = "default"


class VmUpdate(VmRef):
    """`vm.update`: replaces the given parts, if the VM still has the `revision` that was read."""

    revision: Count
    spec: VmSpec | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None


class VmDelete(VmRef):
    """`vm.delete`. `grace_s` 0 ends the guest at once; default: the spec's termination_grace_s."""

    grace_s: Count | None = Field(None, ge=0, le=86_400)


class VmStop(VmRef):
    """`vm.stop`. `grace_s` as in `vm.delete`."""

    grace_s: Count | None = Field(None, ge=0, le=86_400)


class VmStart(VmRef):
    """`vm.start`. `paused` leaves the guest paused; the default is the spec's start_strategy."""

    paused: bool | None = None


class VmRestart(VmRef):
    """`vm.restart`: ends the guest, with `grace_s` as in `vm.delete`, and starts it again."""

    grace_s: Count | None = Field(None, ge=0, le=86_400)


class VmCommand(VmRef):
    """`vm.reset`, `vm.soft-reboot`: act on the running guest, once for each request id.

    `vm.thaw`: thaws the guest's file systems.

    `epoch` is the epoch in the VmView that the client has read. If the VM has another epoch by now,
    the answer is 409 `moved`.
    """

    epoch: Count | None = Field(None, ge=1)


FREEZE_MAX_S = 3600


class VmFreeze(VmCommand):
    """`vm.freeze`: freezes the guest's file systems for at most `timeout_s`.

    If the guest is frozen already, the request sets a new deadline. `epoch` is as in `VmCommand`.
    """

    timeout_s: Count = Field(300, ge=1, le=FREEZE_MAX_S)


class VmMove(VmRef):
    """`vm.move`: stops the VM and starts it on the node `to`, with new disks from its images.

    The default of `to` is the best other node. `discard_local_disks` permits the loss of the data
    on the VM's disks.
    """

    to: Id | None = None
    discard_local_disks: bool = False


class VmList(StrictModel):
    """`vm.list`. Send the `continue` of a page to request the next page."""

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class VmWatch(StrictModel):
    """`vm.watch`: replies arrive on the request's inbox, see `WatchReply`.

    `after` is the `after` of an earlier reply. Without `after` the watch starts with a full list.
    """

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    uid: Uid | None = None
    name: Id | None = None
    after: str | None = Field(None, max_length=128)


class NodeRef(StrictModel):
    """A reference to a node."""

    node: Id


class NodeForget(NodeRef):
    """`node.forget`. The lists name, as NAMESPACE/NAME, each object that is lost with the node."""

    lose_volumes: tuple[VolumeName, ...] = Field((), max_length=10_000)
    lose_snapshots: tuple[VolumeName, ...] = Field((), max_length=10_000)


class NodeDrain(NodeRef):
    """`node.drain`: cordons a node and evacuates its VMs.

    With `discard_local_disks`, VMs with local disks and without an eviction strategy leave as well.
    """

    discard_local_disks: bool = False


class NodeFence(NodeRef):
    """`node.fence`: declares a node powered off. `confirm` is the proof, in words."""

    confirm: Annotated[str, StringConstraints(min_length=3, max_length=500)]
    discard_local_disks: bool = False


class NodeAudit(StrictModel):
    """`node.audit`: compares one node, or all, with the records. `repair` removes orphans."""

    node: Id | None = None
    repair: bool = False


class BusRebuild(StrictModel):
    """`bus.rebuild`: restores lost records from the hosts' copies; `dry_run` only reports them.

    After the restore, each node that answered joins this bus, also a node that had joined another
    bus. A node does not join if the step of one of its VMs is `conflict`.
    """

    dry_run: bool = False
    accept_unsigned: tuple[UnsignedRecord, ...] = Field((), max_length=1000)
    """Records that no controller of this bus has signed and that a person accepts."""
    accept_groups: tuple[HostGroup, ...] = Field((), max_length=1000)
    """Copies of security groups that a person accepts, as `NODE/NAMESPACE/NAME@DIGEST`."""


class Empty(StrictModel):
    """A message without fields."""


class VmPage(Paged):
    """A page of `vm.list`."""

    items: tuple[VmView, ...] = ()


class VmCreated(LenientModel):
    """The answer of `vm.create`. `created` is False if the VM existed already, unchanged."""

    vm: VmView
    created: bool
    warnings: tuple[Detail, ...] = ()
    """Parts of the request that are accepted, and probably have no effect."""


class WatchReply(LenientModel):
    """One reply of a watch: exactly one of `items`, `synced`, `change`, `gone`, `resync`, `beat`.

    A new watch with this `after` continues after this reply. The first reply contains `renew`, the
    subject for renewals. Publish any message to `renew` after `synced`, then at least every 30 s.
    The watch ends 30 s after `synced` or the last renewal. If an account opens too many watches,
    its oldest watch that was never renewed ends with 429 `displaced`.
    """

    items: tuple[VmView, ...] | None = None
    synced: bool = False
    change: VmView | None = None
    gone: str | None = None
    resync: bool = False
    beat: bool = False
    after: str = ""
    renew: str = ""


class NodePage(Paged):
    """A page of `node.list`."""

    items: tuple[NodeView, ...] = ()
    alarms: tuple[str, ...] = ()
    """Problems that need a person, one sentence each."""


class NodeVm(LenientModel):
    """A VM on a node. `eviction_blocked_reason` says why a drain or fence does not move it."""

    uid: Uid
    namespace: str
    name: str
    state: VmState
    evacuating: bool = False
    eviction_blocked_reason: str = ""


class NodeDetail(LenientModel):
    """The answer of `node.get` and of verbs that change a node's desired state or host record."""

    node: NodeView
    vms: tuple[NodeVm, ...] = ()
    unlisted: int = 0
    """Further VMs of the node that did not fit into this answer."""


class NodeForgotten(LenientModel):
    """The answer of `node.forget`: the bus has no data of the node any more."""

    node: str
    statuses: int = 0
    """Number of removed VM statuses of the node."""
    lost_volumes: int = 0


class NetworkPage(Paged):
    """A page of `network.offers`."""

    items: tuple[NetworkInfo, ...] = ()


class ConsumerStatus(LenientModel):
    """A consumer. `pending` counts undelivered messages, `waiting` unanswered pull requests."""

    name: str
    pending: int = 0
    waiting: int = 0


class StreamStatus(LenientModel):
    """A stream of the bus; `fill` is the used share of its size limit, 0.0-1.0."""

    name: str
    fill: float = 0.0
    messages: int = 0
    replicas: int = 1
    consumers: tuple[ConsumerStatus, ...] = ()


class BusStatus(LenientModel):
    """The answer of `bus.status`.

    `nodes` has as many nodes as fit into one message; `node.list` has all.
    """

    streams: tuple[StreamStatus, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    unlisted_nodes: int = 0
    vms: dict[str, int] = Field(default_factory=dict)
    """Number of VMs in each state."""
    queue_depth: int = 0
    """Number of VMs that should run and do not run yet."""
    oldest_pending_created_ns: int | None = None
    unplaced: int = 0
    """Number of VMs without a node."""
    dead_letters: int = 0
    """Number of messages of the last 30 days that could not be handled."""
    skew_s: float = 0.0
    servers: int = 0
    """Number of servers that hold a replica of every stream."""
    servers_current: int = 0
    """Number of those servers that are online and up to date."""
    highly_available: bool = False
    alarms: tuple[str, ...] = ()
    """Problems that need a person, one sentence each."""


class RebuiltVm(LenientModel):
    """The result of a rebuild for one VM; `step` is a value of the controller's `RebuildAction`."""

    uid: Uid
    namespace: str = ""
    name: str = ""
    node: str = ""
    step: str
    message: str = ""


class RebuiltNode(LenientModel):
    """A node of the rebuild. If it has not `joined` this bus, `message` says why."""

    node: str
    vms: int = 0
    joined: bool = False
    message: str = ""


class BusRebuilt(LenientModel):
    """The answer of `bus.rebuild`. `kept` counts the VMs that need no change and no explanation."""

    vms: tuple[RebuiltVm, ...] = ()
    nodes: tuple[RebuiltNode, ...] = ()
    groups: tuple[RebuiltGroup, ...] = ()
    """Security groups that hosts have, and that the bus lacks or has in an older version."""
    groups_omitted: int = 0
    """The number of further groups, which do not fit in the answer."""
    groups_message: str = ""
    """The reason why groups may be missing, such as hosts that did not answer in time."""
    kept: int = 0


class NodeFindings(LenientModel):
    """The audit of one node; `message` says why findings are missing, if any are."""

    node: str
    findings: tuple[AuditFinding, ...] = ()
    message: str = ""


class NodeAudited(LenientModel):
    """The answer of `node.audit`. All is well if no node has a finding or a message."""

    nodes: tuple[NodeFindings, ...] = ()
