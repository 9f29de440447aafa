"""Security groups that hosts have and the bus has lost (ADR 0069)."""

from pydantic import Field

from virtbus.schemas.model import LenientModel
from virtbus.schemas.security_group import GroupSpec, NodeGroup


class GroupsRead(LenientModel):
    """`rpc.netd.groups`: read a host's copies of its VMs' security groups, to rebuild a lost bus.

    The answer is a page of the groups whose key is above `after`.
    """

    after: str = ""


class KnownGroups(LenientModel):
    """A page of a host's groups, without peers, by key. `more` is set if another page follows."""

    groups: dict[str, NodeGroup] = Field(default_factory=dict)
    more: bool = False


class RebuiltGroup(LenientModel):
    """The result for one copy of a group. `step` is a value of the controller's `GroupAction`.

    `nodes` have this copy. An unconfirmed copy is written once a person accepts it with its
    `digest`. The digest covers the whole copy: it changes with the selector and with each rule.
    """

    namespace: str
    name: str
    nodes: tuple[str, ...] = ()
    step: str
    digest: str = ""
    message: str = ""
    spec: GroupSpec | None = None
