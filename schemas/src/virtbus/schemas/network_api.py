"""Requests and answers of the public API about networks, `virtbus.api.v1.network.<verb>`."""

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.network_object import (
    DNS_MAX,
    NetworkScope,
    NetworkSpec,
    NetworkState,
    Server,
)
from virtbus.schemas.nic import MTU_MAX, MTU_MIN
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count
from virtbus.schemas.vm import Labels


class NetworkCreate(StrictModel):
    """`network.create`. The namespace `_` has the networks that all namespaces may use.

    Without `uid` the server generates one. Send your own UUID to make the request repeatable.
    """

    name: Id
    namespace: NetworkScope = "default"
    uid: Uid | None = None
    labels: Labels = Field(default_factory=dict)
    spec: NetworkSpec


class NetworkRef(StrictModel):
    """`network.get`. The request is refused if the network has another uid than `uid`."""

    name: Id
    namespace: NetworkScope = "default"
    uid: Uid | None = None


class NetworkUpdate(NetworkRef):
    """`network.update`: changes the given fields; `labels` replaces all labels.

    `dns` and `mtu` take effect only for VMs that begin to use the network later.
    """

    dns: tuple[Server, ...] | None = Field(None, max_length=DNS_MAX)
    mtu: Count | None = Field(None, ge=MTU_MIN, le=MTU_MAX)
    protected: bool | None = None
    labels: Labels | None = None


class NetworkDelete(NetworkRef):
    """`network.delete`: refused while VMs use the network."""


class NetworkList(StrictModel):
    """`network.list`. Send the `continue` of a page to request the next page."""

    namespace: NetworkScope | None = None
    labels: Labels = Field(default_factory=dict)
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class NeededRoute(LenientModel):
    """A route that the outside needs to reach guests of a `routed` network."""

    destination: str
    node: Id
    via: tuple[str, ...] = ()
    """Addresses of the node; empty while the node does not report any."""


class NetworkObjectView(LenientModel):
    """A network as the API shows it."""

    uid: Uid
    namespace: str
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    spec: NetworkSpec
    state: NetworkState
    message: str = ""
    """The reason for a wait or a reverted delete, and the next step; otherwise empty."""
    routes: tuple[NeededRoute, ...] = ()
    users: tuple[str, ...] = ()
    """The first VMs that use the network, as `<namespace>/<name>`."""
    user_count: int = 0
    given: int = 0
    """Number of the network's addresses that are claimed on the bus."""
    generation: int
    revision: int
    created_ns: int


class NetworkCreated(LenientModel):
    """The answer of `network.create`. `created` is False if the network existed, unchanged."""

    network: NetworkObjectView
    created: bool = False


class NetworkObjectPage(Paged):
    """A page of `network.list`, ordered by namespace and name."""

    items: tuple[NetworkObjectView, ...] = ()
