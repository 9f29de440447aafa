"""Names on networks other than the built-in one, with real packets to their gateways."""

from typing import Any

import pytest
from services.netd.tests.dns_clients import asking, upstream
from services.netd.tests.pretended_host import Host, eventually
from services.netd.tests.test_network_objects import OTHER, target
from services.netd.tests.test_overlay_networks import overlay
from services.netd.tests.test_resolver import A, B, C, client, resolving

pytestmark = pytest.mark.integration

CLUSTER_DNS = "192.0.2.54"
WEB = {"namespace": "shop", "name": "web"}
DB = {"namespace": "shop", "name": "db"}
OF_BANK = {"namespace": "bank", "name": "vault"}


@pytest.mark.parametrize("kind", ["nat", "routed", "overlay"])
async def test_the_gateway_resolves_names_by_udp_and_tcp(host: Host, kind: str) -> None:
    def on(last: int) -> dict[str, Any]:
        return overlay(address=f"10.200.0.{last}") if kind == "overlay" else target(kind)

    async with resolving(host) as (node, _server), upstream() as other:
        web = await client(node, A, **on(5), **WEB)
        db = await client(node, B, **on(6), **DB)
        assert web.gateway == "10.200.0.1"
        for tcp in (False, True):
            assert await web.found("db.shop.vm.internal", tcp=tcp) == [str(db.ip)]
            assert await web.found("www.example", tcp=tcp) == ["203.0.113.7"]
        await node.attachments.release(A, 1_000)
        assert await db.found("db.shop.vm.internal", tcp=True) == [str(db.ip)]
        assert "www.example." in other.names
        await eventually(lambda: str(web.ip) not in asking())


async def test_other_names_go_to_the_servers_of_the_network(host: Host) -> None:
    async with (
        resolving(host) as (node, _server),
        upstream() as of_host,
        upstream(CLUSTER_DNS) as of_cluster,
    ):
        web = await client(node, A, **target("nat", dns=[CLUSTER_DNS]), **WEB)
        db = await client(node, B, **DB)
        assert await web.found("api.svc.cluster.local") == ["203.0.113.7"]
        assert await web.found("big.example", "TXT", tcp=True) != "NOERROR"
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
        assert await db.found("www.example") == ["203.0.113.7"]
        assert of_cluster.names == ["api.svc.cluster.local.", "big.example."]
        assert of_host.names == ["www.example."]


async def test_a_network_may_share_names_between_namespaces(host: Host) -> None:
    async with resolving(host) as (node, _server):
        shared = target("nat", share_names=True)
        web = await client(node, A, **shared, **WEB)
        vault = await client(node, B, **shared, **OF_BANK)
        other = target("nat", OTHER, "red", subnet="10.201.0.0/24")
        alone = await client(node, C, **other, **DB)
        assert await web.found("vault.bank.vm.internal") == [str(vault.ip)]
        assert await alone.found("vault.bank.vm.internal") in {"SERVFAIL", "NXDOMAIN"}
