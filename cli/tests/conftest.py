"""A real nats-server with virtbus' own permissions, and scripted services on it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from cli.tests.fakes import VERBS, Cli, Ended, Script, environment, run

from virtbus.bus.client.connection import connect
from virtbus.bus.client.ports import Endpoint, ServiceInfo
from virtbus.bus.provisioning import server
from virtbus.schemas.subjects import api
from virtbus.schemas.version import VERSION


@pytest.fixture
async def script(tmp_path: Path) -> AsyncIterator[Script]:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.running(files, nodes=["n1"], port=-1))
        bus = await stack.enter_async_context(
            connect(running.settings("controller"), name="controller")
        )
        node = await stack.enter_async_context(connect(running.settings("node-n1"), name="n1"))
        found = Script(bus, node, files)
        endpoints = [Endpoint(f"{r}-{v}", api(r, v), found.dispatch) for r, v in VERBS]
        info = ServiceInfo("virtbus-controller", VERSION, "fake")
        await stack.enter_async_context(bus.serve(info, endpoints))
        yield found


@pytest.fixture
def cli(script: Script) -> Cli:
    """Run the command against the scripted services."""

    async def call(*arguments: str, stdin: str = "", **env: str) -> Ended:
        return await run(*arguments, env=environment(script.files) | env, stdin=stdin)

    return call
