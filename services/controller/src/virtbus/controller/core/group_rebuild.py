"""Decides which security groups a rebuilt bus gets from the copies that hosts have.

A host could invent a group that opens the VMs of other hosts. It could also still have a deleted
group. So a person must read the rules of each copy and accept it (ADR 0069).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from virtbus.controller.core.vm_keys import StoredGroup
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.security_group import NodeGroup, SecurityGroupRecord

Known = StoredGroup | None
"""The group on the bus; None if the bus lacks it."""
Accepted = Mapping[tuple[str, str, str], Collection[str]]
"""By node, namespace and name: the digests of the copies that a person has accepted."""
DIGEST_CHARS = 32
"""128 bits: an attacker needs 2**64 attempts to make two copies with the same digest."""


class GroupAction(StrEnum):
    """The action for one copy of a group."""

    ADD = "add"
    """The bus has no such group: write the copy."""
    RAISE = "raise"
    """The bus has an older generation, for example from a backup: replace it by the copy."""
    UNCONFIRMED = "unconfirmed"
    """Nobody has accepted the copy."""
    CONFLICT = "conflict"
    """The accepted copies differ, a copy has changed since, or the write was refused."""


class HostedGroup(NamedTuple):
    """One copy of a group, the nodes that have it, and the action."""

    step: GroupAction
    group: NodeGroup
    nodes: tuple[str, ...]
    why: str = ""


def digest_of(group: NodeGroup) -> str:
    """Return the digest of a copy without its peers. Equal copies have equal digests."""
    bare = group.model_copy(update={"peers": {}})
    plain = bare.model_dump(mode="json", exclude_defaults=True)
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]


def accepted_copies(words: Iterable[str]) -> Accepted:
    """Return the copies that a person has accepted with `NODE/NAMESPACE/NAME@DIGEST`.

    Raises:
        VirtbusError: 400 `invalid`: a digest is missing.
    """
    found: dict[tuple[str, str, str], set[str]] = {}
    for number, word in enumerate(words):
        copy, _, digest = word.partition("@")
        if not digest:
            message = (
                f"accept_groups[{number}]: must be NODE/NAMESPACE/NAME@DIGEST, as "
                "`virtbus bus rebuild --dry-run` shows it"
            )
            raise VirtbusError(Code.INVALID, "invalid", message)
        node, namespace, name = copy.split("/")
        found.setdefault((node, namespace, name), set()).add(digest)
    return found


def lost_groups(
    reports: Mapping[str, Collection[NodeGroup]],
    bus: Mapping[tuple[str, str], Known],
    accepted: Accepted,
) -> list[HostedGroup]:
    """Return the steps for groups that hosts have, and that the bus lacks or has older.

    `reports` has the groups of each node. `bus` has the group of each name, or None. A group that
    was deleted on this bus is absent from `bus`, and gets no step. Copies with an owner get no
    step, because bridges write their own groups again.
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
    copies: Sequence[tuple[NodeGroup, str]], known: Known, accepted: Accepted
) -> Iterator[HostedGroup]:
    """Yield the steps for the copies of one group. Equal copies of several nodes share a step."""
    words = {node: accepted.get((node, group.namespace, group.name)) for group, node in copies}
    sure = [(group, node) for group, node in copies if digest_of(group) in (words[node] or ())]
    changed = [one for one in copies if words[one[1]] and one not in sure]
    for group, nodes in _distinct(changed):
        why = f"it is not the accepted copy; if its rules are right: {_option(group, nodes)}"
        yield HostedGroup(GroupAction.CONFLICT, group, nodes, why)
    if not sure:
        for group, nodes in _distinct([one for one in copies if one not in changed]):
            why = f"nobody has accepted it; if its rules are right: {_option(group, nodes)}"
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


def _option(group: NodeGroup, nodes: Sequence[str]) -> str:
    name = f"{nodes[0]}/{group.namespace}/{group.name}"
    return f"--accept-group {name}@{digest_of(group)}"


def _distinct(
    copies: Sequence[tuple[NodeGroup, str]],
) -> Iterator[tuple[NodeGroup, tuple[str, ...]]]:
    """Yield each distinct copy with the nodes that have it."""
    left = list(copies)
    while left:
        first = left[0][0]
        yield first, tuple(node for group, node in left if group == first)
        left = [one for one in left if one[0] != first]


def rebuilt(group: NodeGroup, known: Known, now_ns: int) -> SecurityGroupRecord:
    """Return the record made of a copy. A copy has no labels, so only a known record keeps them."""
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
