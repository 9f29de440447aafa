"""Choice of the security group rules for each interface of a VM (ADR 0069)."""

import logging
from collections.abc import Iterator, Sequence

from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.group_filter import GroupedNic, PeerRule, peer_rule
from virtbus.schemas.network_object import NetworkKind
from virtbus.schemas.security_group import (
    ANYWHERE,
    Direction,
    GroupedVm,
    NodeGroup,
    selects,
)

log = logging.getLogger(__name__)

MATCHES_OF_A_VM = 4096
"""Maximum number of ports and peers that each packet of an interface is compared with. Further
rules are left out, so they allow nothing."""


class NodeGroupBook:
    """The security groups of this node's VMs, by key."""

    def __init__(self) -> None:
        self.groups: dict[str, NodeGroup] = {}
        self.nonces: dict[str, str] = {}
        """By key: the nonce of the bus on which the group was last seen."""

    def of(self, attachment: Attachment) -> tuple[GroupedNic, ...]:
        groups = self.of_vm(attachment)
        found = (_grouped(nic, groups) for nic in attachment.nics)
        return tuple(nic for nic in found if nic.isolated)

    def of_vm(self, vm: GroupedVm) -> list[NodeGroup]:
        """Return the groups that select a VM, sorted by name. Other threads may change `groups`."""
        found = (group for group in list(self.groups.values()) if selects(group, vm))
        return sorted(found, key=lambda group: group.name)


def _grouped(nic: Nic, groups: Sequence[NodeGroup]) -> GroupedNic:
    isolated = {direction for group in groups for direction in group.spec.isolated}
    if nic.target is not None and nic.target.spec.default_deny:
        isolated = set(Direction)
    rules = _within(nic, groups) if isolated else ()
    return GroupedNic(
        index=nic.index,
        eth=nic.eth,
        bridge=nic.bridge,
        tap=nic.tap,
        isolated=frozenset(isolated),
        rules=tuple(one for one in rules if one.rule.direction in isolated),
        on_segment=nic.on_segment,
        is_translated=nic.is_translated,
    )


def _within(nic: Nic, groups: Sequence[NodeGroup]) -> Iterator[PeerRule]:
    place, left = _place(nic), MATCHES_OF_A_VM
    for group in groups:
        for rule in group.spec.rules:
            left -= rule.matches
            if left < 0:
                extra = {"code": "too_many_rules"}
                log.error(
                    "%s: rules from group %s on are left out", nic.tap, group.name, extra=extra
                )
                return
            members = (one for name in rule.groups for one in group.addresses(name, place))
            yield peer_rule(rule, tuple(members))


def _place(nic: Nic) -> str:
    """Return the key in `NodeGroup.peers` of the addresses that an interface may see."""
    if nic.target is None:
        return nic.network
    return ANYWHERE if nic.target.spec.kind is NetworkKind.ROUTED else nic.target.uid
