"""The addresses of servers: of several, one that answers is taken; one may be of IPv6."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.tests.fakes import Cli, Script, environment, run

from virtbus.bus.client.connection import connect
from virtbus.bus.provisioning import server

pytestmark = pytest.mark.integration


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"nats://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def away() -> str:
    """Return a URL without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"nats://127.0.0.1:{server.getsockname()[1]}"


async def test_command_takes_the_server_that_answers(
    script: Script, cli: Cli, silent: str, away: str
) -> None:
    script.answer("node", "list", {"items": []})
    url = json.loads(script.files.creds("client").read_text())["url"]
    listed = await cli(
        "node",
        "list",
        VIRTBUS_SERVER=f"{away},{silent},{url}",
        VIRTBUS_CREDS=str(script.files.creds("client")),
    )
    assert listed.code == 0, listed.err


async def test_command_names_every_server_that_does_not_answer(
    script: Script, cli: Cli, silent: str, away: str
) -> None:
    creds = str(script.files.creds("client"))
    listed = await cli("node", "list", VIRTBUS_SERVER=f"{away},{silent}", VIRTBUS_CREDS=creds)
    assert listed.code == 5
    for url in (away, silent):
        assert url.removeprefix("nats://") in listed.err


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_server_listens_on_an_ipv6_address(tmp_path: Path, host: str) -> None:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with server.running(files, host=host, port=-1) as there:
        assert there.url.startswith("nats://[::1]:")
        async with connect(there.settings("admin"), name="admin") as admin:
            assert admin.connected
        listed = await run("node", "list", env=environment(files))
        assert "no controller answers" in listed.err
