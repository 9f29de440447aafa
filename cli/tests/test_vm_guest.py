"""`vm guest`: a scripted agent on a real nats-server."""

import json
from collections.abc import AsyncIterator

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import (
    GuestAsk,
    GuestFilesystem,
    GuestInfo,
    GuestInterface,
    GuestOs,
    GuestQuestion,
    GuestUser,
)
from virtbus.schemas.subjects import rpc
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

INFO = GuestInfo(
    hostname="web\x1b[31m",
    os=GuestOs(pretty_name="Debian 12", kernel_release="6.1.0", machine="x86_64", timezone="UTC"),
    users=(GuestUser(name="debian", login_time_s=1_790_000_000),),
    filesystems=(
        GuestFilesystem(
            name="vda1",
            mountpoint="/",
            type="ext4",
            total_bytes=2 * 1024**3,
            used_bytes=1024**3,
            disks=("vda",),
        ),
    ),
    interfaces=(GuestInterface(name="lo"),),
)


@pytest.fixture
async def asked(script: Script) -> AsyncIterator[list[GuestAsk]]:
    found: list[GuestAsk] = []

    async def guest(request: Request) -> GuestInfo:
        found.append(validate(GuestAsk, request.data))
        if GuestQuestion.USERS in found[-1].about:
            raise VirtbusError(Code.CONFLICT, "guest_agent_absent", "none runs; install it")
        return INFO

    script.answer("vm", "get", vm_view())
    endpoint = Endpoint("guest", rpc("n1", "agent", "guest"), guest)
    async with script.node.serve(ServiceInfo("virtbus-nodeagent", "0", "fake"), [endpoint]):
        yield found


async def test_guest_data_is_shown_in_tables_without_control_characters(
    cli: Cli, asked: list[GuestAsk]
) -> None:
    ended = await cli("vm", "guest", "web")
    assert ended.code == 0, ended.err
    assert asked == [GuestAsk(uid=UID)]
    assert "\x1b" not in ended.out
    tables = [table.splitlines() for table in ended.out.split("\n\n")]
    assert [table[1].split() for table in tables] == [
        ["web\\x1b[31m", "Debian", "12", "6.1.0", "x86_64", "UTC"],
        ["debian", "2026-09-21", "14:13:20Z"],
        ["/", "vda1", "ext4", "2GiB", "1GiB", "vda"],
        ["lo", "-", "-"],
    ]


async def test_a_guest_agent_call_has_a_time_limit(cli: Cli, asked: list[GuestAsk]) -> None:
    ended = await cli("vm", "guest", "web", "ping", "--timeout", "30")
    assert ended.out == "web\\x1b[31m answers\n"
    assert asked == [GuestAsk(uid=UID, about=(GuestQuestion.PING,), timeout_s=30)]


async def test_programs_get_the_answer_as_it_is(cli: Cli, asked: list[GuestAsk]) -> None:
    ended = await cli("vm", "guest", "web", "filesystems", "-o", "json")
    assert GuestInfo.model_validate(json.loads(ended.out)) == INFO
    assert asked[0].about == (GuestQuestion.FILESYSTEMS,)


async def test_a_guest_without_an_agent_is_reported_with_the_next_step(
    cli: Cli, asked: list[GuestAsk]
) -> None:
    ended = await cli("vm", "guest", "web", "users")
    assert ended.code != 0
    assert "install it" in ended.err
    assert len(asked) == 1
