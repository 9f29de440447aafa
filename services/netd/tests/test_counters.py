"""Counters of interfaces: what passes, and what each rule drops."""

from ipaddress import IPv4Address

import pytest
from services.netd.tests.pretended_host import Node
from services.netd.tests.test_filters import forbidden

from virtbus.netd.core.antispoof import Tap, refusals
from virtbus.netd.edge.namespaces import in_thread
from virtbus.schemas.counters import Counters

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
GATEWAY = IPv4Address("10.127.0.1")
EXPECTED = {"mac": 2, "arp": 4, "dhcp": 1, "address": 3, "protocol": 8}
"""The rule of each forbidden frame. netd takes a frame to the port of DHCP servers itself."""


async def counters(node: Node) -> Counters:
    (attachment,) = node.attachments.ready()
    links = node.attachments._builder.links
    return await in_thread(lambda: links.counters(attachment))


async def test_each_refused_frame_is_counted_once_under_its_rule(node: Node) -> None:
    await node.attach(A, networks=("default", "default"))
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        before, other = (await counters(node)).interfaces
        assert before.refused == {}
        for traffic in (before.from_guest, before.to_guest):
            assert traffic.packets >= 2
            assert traffic.bytes >= 2 * 42
        frames = forbidden(guest)
        for frame in frames.values():
            guest.send(frame.ljust(60, b"\0"))
        after, still = (await counters(node)).interfaces
        assert after.refused == EXPECTED
        assert list(EXPECTED) == refusals(Tap("tap0", "02:00:00:00:00:01", ()))
        assert sum(EXPECTED.values()) == len(frames) - 1
        assert after.to_guest == before.to_guest
        assert other == still
        await node.restart()
        assert (await counters(node)).interfaces[0].refused == EXPECTED


async def test_a_filter_that_somebody_removed_has_no_counts(node: Node) -> None:
    await node.attach(A)
    node.inside(A, "nft flush ruleset")
    assert (await counters(node)).interfaces[0].refused == {}
