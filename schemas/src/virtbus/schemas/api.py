"""Requests and answers of the public API, `virtbus.api.v1.<vm|node|image|network>.<verb>`."""

from typing import Annotated

from pydantic import Field, StringConstraints

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageRef
from virtbus.schemas.model import Command, Fact
from virtbus.schemas.network import NetworkInfo
from virtbus.schemas.node import NodeView
from virtbus.schemas.nodework import Finding
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
    VmView,
)


class VmCreate(Command):
    """`vm.create`. Shorthand (`image`, `cpus`, …) fills what `spec` leaves open.

    Without `uid` the server makes one; send your own (a UUID) to repeat safely: the same uid and
    spec answers 200 with the VM as it is.
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
    user_data: str | None = Field(None, max_length=64 * 1024)
    network: Id | None = None


class VmRef(Command):
    """Which VM: by `uid`, or by `name` in `namespace`."""

    uid: Uid | None = None
    name: Id | None = None
    namespace: Id = "default"


class VmUpdate(VmRef):
    """`vm.update`: a whole new spec or labels over the `revision` that was read."""

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
    """`vm.start`. `paused`: leave the guest paused; default: as the spec's start_strategy says."""

    paused: bool | None = None


class VmRestart(VmRef):
    """`vm.restart`: end the guest, `grace_s` as in `vm.delete`, and start it anew."""

    grace_s: Count | None = Field(None, ge=0, le=86_400)


class VmCommand(VmRef):
    """`vm.reset`, `vm.soft-reboot`: once, on the guest that runs now; safe to repeat by request id.

    `epoch` is the view's: with it a guest that runs elsewhere by then is refused (409 `moved`).
    """

    epoch: Count | None = Field(None, ge=1)


class VmMove(VmRef):
    """`vm.move`: stop the VM, start it on `to` (default: the best other node) from its images."""

    to: Id | None = None
    discard_local_disks: bool = False


class VmList(Command):
    """`vm.list`. `continue_` of one page asks for the next."""

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class VmWatch(Command):
    """`vm.watch`: replies on the request's inbox, see `WatchReply`.

    `after` is the `after` of an earlier reply; without it the watch starts with a full list.
    `renew` (seconds it may run unrenewed) is fixed at 30.
    """

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    uid: Uid | None = None
    name: Id | None = None
    after: str | None = Field(None, max_length=128)


class NodeRef(Command):
    """Which node."""

    node: Id


class NodeDrain(NodeRef):
    """`node.drain`. `discard_local_disks`: VMs without an eviction strategy leave as well."""

    discard_local_disks: bool = False


class NodeFence(NodeRef):
    """`node.fence`: the word that a node is off. `confirm` says how that is known."""

    confirm: Annotated[str, StringConstraints(min_length=3, max_length=500)]
    discard_local_disks: bool = False


class NodeAudit(Command):
    """`node.audit`: compare hosts with the records: `node`, or each; `repair` what is left over."""

    node: Id | None = None
    repair: bool = False


class BusRebuild(Command):
    """`bus.rebuild`: write back what the hosts know and the bus has lost, or only tell (`dry_run`).

    Then each node that answered follows this bus, whichever it had joined before.
    """

    dry_run: bool = False


class Empty(Command):
    """A request with nothing to say."""


class VmPage(Paged):
    """A page of `vm.list`."""

    items: tuple[VmView, ...] = ()


class VmCreated(Fact):
    """The answer of `vm.create`: `created` False means it was there already, unchanged."""

    vm: VmView
    created: bool


class WatchReply(Fact):
    """One reply of a watch; exactly one of `items`, `synced`, `change`, `gone`, `resync`, `beat`.

    `after` resumes behind this reply. `renew`, in the first reply, is the subject to send any
    message to at least every 30 s; without it the watch ends 30 s after the last renewal.
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
    """What a person should look at, a sentence each."""


class NodeVm(Fact):
    """A VM of a node. `leaving`: on its way to another; `stays`: why a drain leaves it there."""

    uid: Uid
    namespace: str
    name: str
    state: VmState
    leaving: bool = False
    stays: str = ""


class NodeDetail(Fact):
    """The answer of `node.get` and of every verb that changes what is wanted of a node."""

    node: NodeView
    vms: tuple[NodeVm, ...] = ()
    unlisted: int = 0
    """VMs that are there, too, and had no room in this answer."""


class NodeForgotten(Fact):
    """The answer of `node.forget`: the bus knows nothing of the node any more."""

    node: str
    statuses: int = 0
    """What it had said last of VMs, removed with it."""


class NetworkPage(Paged):
    """A page of `network.list`."""

    items: tuple[NetworkInfo, ...] = ()


class ConsumerStatus(Fact):
    """How far a consumer lags: messages not delivered yet, and requests that wait for some."""

    name: str
    pending: int = 0
    waiting: int = 0


class StreamStatus(Fact):
    """A stream of the bus; `fill` is the share of its limit in use."""

    name: str
    fill: float = 0.0
    messages: int = 0
    replicas: int = 1
    consumers: tuple[ConsumerStatus, ...] = ()


class BusStatus(Fact):
    """The answer of `bus.status`: streams, nodes that fit (`node.list` has all), VMs in figures."""

    streams: tuple[StreamStatus, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    unlisted_nodes: int = 0
    vms: dict[str, int] = Field(default_factory=dict)
    """How many are in each state."""
    queue_depth: int = 0
    """VMs that shall run and do not yet."""
    oldest_pending_created_ns: int | None = None
    unplaced: int = 0
    """VMs that wait for a node."""
    dead_letters: int = 0
    """Messages that could not be handled, of the last 30 days."""
    skew_s: float = 0.0
    servers: int = 0
    """On how many bus servers every stream lies."""
    servers_current: int = 0
    """How many of them are there and up to date."""
    highly_available: bool = False
    alarms: tuple[str, ...] = ()
    """What a person should look at, a sentence each."""


class RebuiltVm(Fact):
    """What became of one VM: `step` is add, raise, move, end, keep or conflict."""

    uid: Uid
    namespace: str = ""
    name: str = ""
    node: str = ""
    step: str
    message: str = ""


class RebuiltNode(Fact):
    """A node that was asked: `joined` when it follows this bus now."""

    node: str
    vms: int = 0
    joined: bool = False
    message: str = ""


class BusRebuilt(Fact):
    """The answer of `bus.rebuild`. VMs that the bus had as they are (`keep`) are only counted."""

    vms: tuple[RebuiltVm, ...] = ()
    nodes: tuple[RebuiltNode, ...] = ()
    kept: int = 0


class NodeFindings(Fact):
    """One node's audit; `message` says why there is none."""

    node: str
    findings: tuple[Finding, ...] = ()
    message: str = ""


class NodeAudited(Fact):
    """The answer of `node.audit`; well when no node has a finding or a message."""

    nodes: tuple[NodeFindings, ...] = ()
