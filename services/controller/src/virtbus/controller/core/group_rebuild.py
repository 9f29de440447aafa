"""Decides which groups of hosts a rebuilt bus gets: only those that a person has accepted.

A host could invent a group that opens VMs of other hosts, or still have one that was deleted. So
no copy of a host is believed without a person, who sees its rules (ADR 0069).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from virtbus.controller.core.vm_keys import StoredGroup
from virtbus.schemas.security_group import NodeGroup, SecurityGroupRecord

Known = StoredGroup | None
"""The group that the bus has."""


class GroupAction(StrEnum):
    """The action for one copy of a group."""

    ADD = "add"
    """The bus has no such group: write the copy."""
    RAISE = "raise"
    """The bus has an older generation, for example of a backup: replace it."""
    UNCONFIRMED = "unconfirmed"
    """Nobody has accepted the copy."""
    CONFLICT = "conflict"
    """The accepted copies differ, or the write was refused."""


@dataclass(frozen=True, slots=True)
class HostedGroup:
    """One copy of a group, the nodes that have it, and the action."""

    step: GroupAction
    group: NodeGroup
    nodes: tuple[str, ...]
    why: str = ""


def lost_groups(
    reports: Mapping[str, Collection[NodeGroup]],
    bus: Mapping[tuple[str, str], Known],
    accepted: Collection[str],
) -> list[HostedGroup]:
    """Return a step for each group that hosts have, and the bus lacks or has in an older version.

    `reports` has the groups of each node. `bus` lacks the names of groups that were deleted on this
    bus. `accepted` has `NODE` or `NODE/NAMESPACE/NAME`. Bridges make their own groups again.
    """
    copies: dict[tuple[str, str], list[tuple[NodeGroup, str]]] = {}
    for node, groups in sorted(reports.items()):
        for group in groups:
            name = group.namespace, group.name
            if not group.owner and name in bus and _is_newer(group, bus[name]):
                bare = group.model_copy(update={"peers": {}})
                copies.setdefault(name, []).append((bare, node))
    return [step for name in sorted(copies) for step in _steps(copies[name], bus[name], accepted)]


def _is_newer(group: NodeGroup, known: Known) -> bool:
    if known is None:
        return True
    return known.record.uid == group.uid and known.record.generation < group.generation


def _steps(
    copies: Sequence[tuple[NodeGroup, str]], known: Known, accepted: Collection[str]
) -> Iterator[HostedGroup]:
    """Yield the steps for the copies of one group: equal copies of several nodes are one."""
    sure = [(group, node) for group, node in copies if _accepts(accepted, group, node)]
    if not sure:
        for group, nodes in _distinct(copies):
            name = f"{nodes[0]}/{group.namespace}/{group.name}"
            why = f"nobody has accepted it; if its rules are right: --accept-group {name}"
            yield HostedGroup(GroupAction.UNCONFIRMED, group, nodes, why)
        return
    newest = max(group.generation for group, _ in sure)
    found = list(_distinct([one for one in sure if one[0].generation == newest]))
    for group, nodes in found:
        if len(found) > 1:
            why = "the copies of accepted hosts differ; accept the group of one host"
            yield HostedGroup(GroupAction.CONFLICT, group, nodes, why)
        else:
            yield HostedGroup(GroupAction.RAISE if known else GroupAction.ADD, group, nodes)


def _accepts(accepted: Collection[str], group: NodeGroup, node: str) -> bool:
    return not {node, f"{node}/{group.namespace}/{group.name}"}.isdisjoint(accepted)


def _distinct(
    copies: Sequence[tuple[NodeGroup, str]],
) -> Iterator[tuple[NodeGroup, tuple[str, ...]]]:
    """Yield each different copy with its nodes."""
    left = list(copies)
    while left:
        first = left[0][0]
        yield first, tuple(node for group, node in left if group == first)
        left = [one for one in left if one[0] != first]


def rebuilt(group: NodeGroup, known: Known, now_ns: int) -> SecurityGroupRecord:
    """Return the record of a copy. The labels of the group are lost unless the bus has them."""
    if known is not None:
        update = {"spec": group.spec, "generation": group.generation}
        return known.record.model_copy(update=update)
    return SecurityGroupRecord(
        uid=group.uid,
        namespace=group.namespace,
        name=group.name,
        spec=group.spec,
        generation=group.generation,
        created_ns=now_ns,
    )
