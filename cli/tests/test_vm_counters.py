"""`vm get --counters`: a scripted agent on a real nats-server."""

import json
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas.counters import Counters, CountersAsk, NicCounters, Traffic
from virtbus.schemas.subjects import rpc
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

NIC = NicCounters(
    name="default",
    to_guest=Traffic(bytes=3 * 1024**2, packets=2100, dropped=4),
    from_guest=Traffic(bytes=1024, packets=9),
    refused={"arp": 2, "protocol": 7},
)


async def test_counters_are_read_on_request_only(script: Script, cli: Cli) -> None:
    asked: list[Any] = []

    async def counters(request: Request) -> Counters:
        asked.append(validate(CountersAsk, request.data))
        return Counters(uid=UID, interfaces=(NIC,))

    script.answer("vm", "get", vm_view())
    endpoint = Endpoint("counters", rpc("n1", "agent", "counters"), counters)
    async with script.node.serve(ServiceInfo("virtbus-nodeagent", "0", "fake"), [endpoint]):
        assert (await cli("vm", "get", "web")).code == 0
        assert asked == []
        ended = await cli("vm", "get", "web", "--counters")
        assert ended.code == 0, ended.err
        row = next(line for line in ended.out.splitlines() if "arp 2, protocol 7" in line)
        assert row.split()[:4] == ["default", "3MiB", "2100", "4"]
        ended = await cli("vm", "get", "web", "--counters", "-o", "json")
        assert json.loads(ended.out)["counters"][0]["refused"] == {"arp": 2, "protocol": 7}
    assert [one.uid for one in asked] == [UID, UID]
