"""Requests and answers of the public API about security groups."""

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count
from virtbus.schemas.security_group import Direction, GroupSpec
from virtbus.schemas.vm import Labels


class SecurityGroupCreate(StrictModel):
    """`security-group.create`. The group's rules apply to running VMs, too.

    Without `uid` the server generates one. Send your own UUID to make the request repeatable.
    """

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None
    labels: Labels = Field(default_factory=dict)
    spec: GroupSpec


class SecurityGroupRef(StrictModel):
    """`security-group.get`. The request is refused if the group has another uid than `uid`."""

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None


class SecurityGroupUpdate(SecurityGroupRef):
    """`security-group.update`: `spec` and `labels` replace the former values completely.

    With `revision`, the update is refused if the group was changed after that revision.
    """

    spec: GroupSpec | None = None
    labels: Labels | None = None
    revision: Count | None = Field(None, ge=1)


class SecurityGroupDelete(SecurityGroupRef):
    """`security-group.delete`: ends the rules.

    VMs in no other group then have all connections again. On networks with `default_deny`, these
    VMs have none.
    """


class SecurityGroupList(StrictModel):
    """`security-group.list`. Send the `continue` of a page to request the next page."""

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class SecurityGroupView(LenientModel):
    """A security group as the API shows it."""

    uid: Uid
    namespace: str
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    spec: GroupSpec
    isolates: tuple[Direction, ...] = ()
    """The directions in which members have only connections that a rule allows."""
    members: tuple[str, ...] = ()
    """The names of the first VMs that the group selects."""
    member_count: int = 0
    message: str = ""
    """The groups in the rules that do not exist; empty if all exist."""
    owner: str = ""
    generation: int
    revision: int
    created_ns: int


class SecurityGroupCreated(LenientModel):
    """The answer of `security-group.create`. `created` is False if this group existed before."""

    group: SecurityGroupView
    created: bool = False


class SecurityGroupPage(Paged):
    """A page of `security-group.list`, ordered by namespace and name."""

    items: tuple[SecurityGroupView, ...] = ()
