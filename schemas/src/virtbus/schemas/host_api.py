"""Requests about a node's host: takeover by another host, and approved capacity."""

from typing import Annotated

from pydantic import Field, StringConstraints

from virtbus.schemas.api import NodeRef
from virtbus.schemas.ids import Id
from virtbus.schemas.quantity import Count
from virtbus.schemas.vm import Labels


class NodeTakeover(NodeRef):
    """`node.takeover`: gives the node to an agent that was refused on another host, and waits.

    `confirm` says how the previous host is known to be off. `instance` names the agent if several
    wait.
    """

    confirm: Annotated[str, StringConstraints(min_length=3, max_length=500)]
    instance: Id | None = None


class NodeApprove(NodeRef):
    """`node.approve`: sets the labels and size that the node may offer.

    An omitted field gets the value that the node reports now.
    """

    labels: Labels | None = None
    cpus: Count | None = Field(None, ge=1)
    memory_bytes: Count | None = Field(None, ge=1)
    disk_bytes: Count | None = Field(None, ge=1)
