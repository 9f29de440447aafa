"""`virtbus node up`: a host joins a running bus, or gets a clear reason for the refusal."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import Ended, environment, run, start
from cli.tests.test_up import children, end_all_of, until_service

from virtbus.cli.failures import CliError
from virtbus.cli.up.command import _cluster
from virtbus.cli.up.plan import BUS_ONLY, NODE_ONLY, Place
from virtbus.cli.up.plan import environment as service_environment
from virtbus.cli.up.remote_bus import settle

URL = "nats://10.0.0.1:4222,nats://10.0.0.2:4222"


def creds(path: Path, **fields: str) -> Path:
    path.write_text(json.dumps({"user": "node-n2", "password": "p", "node": "n2", **fields}))
    return path


def place(file: Path, *, node: str = "", server: str = URL) -> Place:
    return Place(Path("/s"), Path("/r"), node, False, "INFO", NODE_ONLY, server, file)


def test_services_of_a_node_elsewhere_get_its_credentials_and_all_servers(tmp_path: Path) -> None:
    there = settle(place(creds(tmp_path / "c")))
    assert there.services == ("imaged", "netd", "nodeagent")
    env = service_environment(there, "netd", parent_fd=7, notify="@a", inherited={})
    assert (env["VIRTBUS_SERVER"], env["VIRTBUS_CREDS"]) == (URL, str(tmp_path / "c"))
    assert env["VIRTBUS_NODE"] == "n2"


def test_url_of_the_credentials_is_taken_where_none_is_named(tmp_path: Path) -> None:
    file = creds(tmp_path / "c", url="nats://h:1")
    assert settle(place(file, server="")).server == "nats://h:1"


@pytest.mark.parametrize(
    ("fields", "node", "server", "message"),
    [
        ({}, "n3", URL, "of node n2, not of n3"),
        ({"node": ""}, "", URL, "not of a node"),
        ({}, "", "http://h", "scheme"),
        ({}, "", "", "no bus is named"),
    ],
)
def test_credentials_and_url_that_cannot_be_right_are_refused(
    tmp_path: Path, fields: Mapping[str, str], node: str, server: str, message: str
) -> None:
    with pytest.raises(CliError, match=message):
        settle(place(creds(tmp_path / "c", **fields), node=node, server=server))


def test_a_bus_without_a_node_runs_a_controller() -> None:
    assert Place(Path("/s"), Path("/r"), "n1", False, runs=BUS_ONLY).services == ("controller",)


@pytest.mark.parametrize(
    ("listen", "routes"),
    [
        ("a:1", None),
        (None, "a:1,b:1,c:1"),
        ("a:1", "a:1,b:1"),
        ("d:1", "a:1,b:1,c:1"),
        ("a:1", "a:1,b,c:1"),
    ],
)
def test_a_cluster_is_three_servers_that_name_each_other(
    listen: str | None, routes: str | None
) -> None:
    with pytest.raises(CliError, match="given together"):
        _cluster(listen, routes, 4222)


def test_a_member_of_a_cluster_knows_the_others() -> None:
    found = _cluster("a:1", "a:1, b:1,c:1", 4222)
    assert found is not None
    assert found.others == ["b:1", "c:1"]
    assert found.peers(4222) == ["nats://b:4222", "nats://c:4222"]


# --- real server --------------------------------------------------------------------------


@asynccontextmanager
async def shown(line: bytes, base: Path, *argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a `virtbus …` until the context ends, after it has printed `line`."""
    process = await start(*argv, env=environment(), stderr=asyncio.subprocess.STDOUT)
    assert process.stdout is not None
    seen: list[bytes] = []
    try:
        async with asyncio.timeout(40):
            while not seen or line not in seen[-1]:
                seen.append(await process.stdout.readline())
                assert seen[-1], b"".join(seen).decode()
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()
        end_all_of(base)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """A bus with a node n1 that lets n2 log in; the environment of its client."""
    base = tmp_path / "one"
    argv = ("up", "--simulate", "--data", str(base), "--port", "-1", "--node", "n1")
    async with shown(b"Ctrl-C stops", base, *argv, "--nodes", "n2"):
        yield environment() | {"VIRTBUS_CREDS": str(base / "run" / "bus.creds")}


def joining(tmp_path: Path, *more: str) -> tuple[str, ...]:
    file = str(tmp_path / "one" / "run" / "node-n2.creds")
    return ("node", "up", "--simulate", "--data", str(tmp_path / "two"), "--creds", file, *more)


async def nodes(env: Mapping[str, str]) -> list[dict[str, Any]]:
    listed = await run("node", "list", "-o", "json", env=dict(env))
    assert listed.code == 0, listed.err
    found: list[dict[str, Any]] = listed.json["items"]
    return found


async def image_on_both(env: Mapping[str, str]) -> None:
    """Pull the image, and wait for all services: without both, a node takes no VM."""
    pulled = await run("image", "pull", "tiny", env=dict(env))
    assert pulled.code == 0, pulled.err
    async with asyncio.timeout(30):
        while True:
            listed = await run("image", "list", "-o", "json", env=dict(env))
            here = [sorted(image["nodes"]) for image in listed.json["items"]] == [["n1", "n2"]]
            services = [one for node in await nodes(env) for one in node["services"].values()]
            if here and all(one["state"] == "ready" for one in services):
                return


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_node_joins_a_running_bus_and_runs_vms(tmp_path: Path, here: dict[str, str]) -> None:
    async with shown(b"Ctrl-C stops", tmp_path / "two", *joining(tmp_path)) as process:
        assert {node["node"]: node["state"] for node in await nodes(here)} == {
            "n1": "ready",
            "n2": "ready",
        }
        await image_on_both(here)
        names = [f"vm-{number}" for number in range(4)]
        for name in names:
            created = await run(
                *("vm", "create", name, "--image", "tiny", "--wait", "running", "-o", "json"),
                env=here,
            )
            assert created.code == 0, created.err
        assert {node["vms"] for node in await nodes(here)} == {2}
        again = await run(*joining(tmp_path), env=environment())
        assert again.code == 1
        assert f"(process {process.pid})" in again.err
        os.kill(await until_service(process.pid, "simulator"), signal.SIGKILL)
        assert process.stdout is not None
        async with asyncio.timeout(15):
            while b"simulator ended (SIGKILL)" not in await process.stdout.readline():
                pass
        gone = await run("vm", "delete", *names, "--grace", "0", env=here)
        assert gone.code == 0, gone.err
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        assert "stopping (SIGINT)" in out.decode()
        assert not children(process.pid)


@pytest.mark.integration
async def test_wrong_credentials_and_wrong_urls_have_different_errors(
    tmp_path: Path, here: dict[str, str]
) -> None:
    file = tmp_path / "one" / "run" / "node-n2.creds"
    content = json.loads(file.read_text())
    refused = await tried(tmp_path, {**content, "password": "no"})
    assert refused.code == 1
    assert "refuses" in refused.err
    nowhere = await tried(tmp_path, {**content, "url": "nats://127.0.0.1:1"})
    assert nowhere.code == 5
    assert "127.0.0.1:1 does not answer" in nowhere.err
    client = await tried(tmp_path, json.loads(Path(here["VIRTBUS_CREDS"]).read_text()))
    assert client.code == 2
    assert "not of a node" in client.err


async def tried(tmp_path: Path, content: Mapping[str, str]) -> Ended:
    file = tmp_path / "tried.creds"
    file.write_text(json.dumps(content))
    argv = ("node", "up", "--simulate", "--data", str(tmp_path / "two"), "--creds", str(file))
    return await run(*argv, env=environment())
