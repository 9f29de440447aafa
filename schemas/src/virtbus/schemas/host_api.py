"""Requests about the host that a node is: taking over, and what it may offer."""

from typing import Annotated

from pydantic import Field, StringConstraints

from virtbus.schemas.api import NodeRef
from virtbus.schemas.ids import Id
from virtbus.schemas.quantity import Count
from virtbus.schemas.vm import Labels


class NodeTakeover(NodeRef):
    """`node.takeover`: give the node to the refused agent that waits for it.

    `confirm` says how the host before is known to be off, and `instance` which agent is meant where
    several wait.
    """

    confirm: Annotated[str, StringConstraints(min_length=3, max_length=500)]
    instance: Id | None = None


class NodeApprove(NodeRef):
    """`node.approve`: what the node may offer; what is left out is as it reports it now."""

    labels: Labels | None = None
    cpus: Count | None = Field(None, ge=1)
    memory_bytes: Count | None = Field(None, ge=1)
    disk_bytes: Count | None = Field(None, ge=1)
