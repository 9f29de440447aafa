"""With several servers, the command skips one that is down or silent."""

import json
import socket
from collections.abc import Iterator

import pytest
from cli.tests.fakes import Cli, Script

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
