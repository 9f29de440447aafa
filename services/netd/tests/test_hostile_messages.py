"""netd survives every message, and every requester gets an answer (ADR 0028)."""

import pytest
from services.netd.tests.pretended_host import Host, make_record
from services.netd.tests.test_service import A, serving
from tests.hostile import attack, unheard

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.netd.__main__ import host_ports
from virtbus.netd.service import teardown

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_netd_survives_every_message(host: Host) -> None:
    server = MemoryServer()
    async with serving(host, server) as desk:
        assert not unheard(server, "rpc", "netd.")
        await attack(server, heard_by=("rpc.netd.", "$SRV."))
        await desk.put(make_record(A))
        assert (await desk.ready()).error is None
    await teardown(desk.settings, host_ports(desk.settings))
