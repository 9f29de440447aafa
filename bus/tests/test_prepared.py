"""A prepared bus starts unchanged, by TLS and nkeys, and rejects withdrawn credentials."""

import asyncio
import json
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from virtbus.bus.client import health, nkeys
from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import ServiceInfo
from virtbus.bus.errors import BusError, DeniedError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import certificate_authority, server, stream_setup
from virtbus.bus.provisioning.bus_directory import BusDirectory, BusPlan, parse_servers
from virtbus.bus.provisioning.config_reload import reload_servers
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.tasks import background
from virtbus.cli.__main__ import main
from virtbus.cli.wire.access import find
from virtbus.cli.wire.connection import Connection, LinkError

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
THREE = [["127.0.0.1", "localhost"], ["127.0.0.2"], ["127.0.0.3"]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


def made(base: Path, servers: list[list[str]], nodes: list[str]) -> BusDirectory:
    prepared = BusDirectory(base / "bus")
    plan = BusPlan(servers, free_port(), free_port(), 0, bind_names=True, nodes=nodes)
    plan.store = str(base / "store-{number}")  # here all are on one host
    prepared.write(plan)
    return prepared


@asynccontextmanager
async def started(prepared: BusDirectory, number: int) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        server.binary(),
        "-c",
        prepared.folder(number) / "nats-server.conf",
        "-l",
        prepared.base / f"{number}.log",
    )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


def settings(prepared: BusDirectory, user: str, **more: object) -> BusSettings:
    return BusSettings(creds=prepared.creds(user), connect_timeout_s=8, **more)  # type: ignore[arg-type]  # test data


async def declare(prepared: BusDirectory) -> None:
    async with asyncio.timeout(40), connect(settings(prepared, "admin"), name="a") as admin:
        while True:
            try:
                await stream_setup.ensure(admin)
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.2)
            else:
                return


def test_a_certificate_without_names_is_a_finding(tmp_path: Path) -> None:
    ca, pair = tmp_path / "ca", tmp_path / "server"
    certificate_authority.ensure_ca(ca)
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(ca.with_suffix(".crt").read_bytes())
    ca_key = serialization.load_pem_private_key(ca.with_suffix(".key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    nameless = certificate_authority._builder("x", key, issuer.subject, 100)
    certificate_authority._write_pair(pair, key, nameless.sign(ca_key, hashes.SHA256()))
    (found,) = certificate_authority.problems(ca, pair, ["localhost"])
    assert "does not name localhost" in found
    assert certificate_authority.ensure_server(ca, pair, ["localhost"])
    assert certificate_authority.problems(ca, pair, ["localhost"]) == []


def test_a_key_of_another_certificate_is_a_finding_and_renewed(tmp_path: Path) -> None:
    ca, pair, other = tmp_path / "ca", tmp_path / "server", tmp_path / "other"
    certificate_authority.ensure_ca(ca)
    for one in (pair, other):
        certificate_authority.ensure_server(ca, one, ["localhost"])
    other.with_suffix(".key").rename(pair.with_suffix(".key"))  # as after a crash in a renewal
    (found,) = certificate_authority.problems(ca, pair, ["localhost"])
    assert "server.key is not the key of" in found
    assert certificate_authority.ensure_server(ca, pair, ["localhost"])
    assert certificate_authority.problems(ca, pair, ["localhost"]) == []


def test_a_seed_signs_as_the_nkeys_specification_says() -> None:
    seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
    assert nkeys.public(seed) == "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
    assert nkeys.public(nkeys.new_seed()).startswith("U")
    for wrong in ("", "SU", "not a seed", seed[:-1] + "A", "SA" + seed[2:]):
        with pytest.raises(ValueError, match=r"."):
            nkeys.public(wrong)


def test_making_it_again_changes_nothing_and_secrets_are_private(tmp_path: Path) -> None:
    prepared = made(tmp_path, THREE, ["n1"])
    prepared.write(prepared.plan())
    assert prepared.write(prepared.plan()) == []
    public = (prepared.base / "bus.json").read_text() + "".join(
        path.read_text() for path in prepared.base.glob("server-*/*.conf")
    )
    for path in [*prepared.base.glob("creds/*"), *prepared.base.rglob("*.key")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
        if path.suffix == ".creds":
            assert json.loads(path.read_text())["nkey_seed"] not in public


def test_a_node_that_comes_again_has_other_keys(tmp_path: Path) -> None:
    prepared = made(tmp_path, [["localhost"]], ["n1"])
    before = prepared.plan().keys["node-n1"]
    prepared.remove_node("n1")
    assert not prepared.creds("node-n1").exists()
    assert "node-n1" not in (prepared.folder(1) / "accounts.conf").read_text()
    prepared.add_node("n1")
    assert prepared.plan().keys["node-n1"] != before


def test_three_servers_need_three_hosts() -> None:
    assert parse_servers(["a,10.0.0.1", "b"], 1) == [["a", "10.0.0.1", "b"]]
    with pytest.raises(ValueError, match="3 times --host"):
        parse_servers(["a", "b"], 3)


def test_each_violation_is_found(tmp_path: Path) -> None:
    prepared = made(tmp_path, [["localhost"]], [])
    prepared.write(prepared.plan())
    assert list(prepared.problems(server.binary())) == []
    config = prepared.folder(1) / "nats-server.conf"
    config.write_text(config.read_text() + 'http: "0.0.0.0:8222"\nno_auth_user: x\n')
    prepared.creds("admin").chmod(0o644)
    certificate_authority.ensure_ca(tmp_path / "other")
    (prepared.folder(1) / "server.crt").unlink()
    certificate_authority.ensure_server(
        tmp_path / "other", prepared.folder(1) / "server", ["elsewhere"]
    )
    found = "\n".join(prepared.problems(server.binary()))
    for said in (
        "chmod 0600",
        "no_auth_user",
        "not on 127.0.0.1",
        "was not issued by the CA",
        "name localhost",
    ):
        assert said in found


@pytest.mark.integration
async def test_three_servers_start_and_a_node_comes_and_goes(tmp_path: Path) -> None:
    prepared = made(tmp_path, THREE, ["n1"])
    async with AsyncExitStack() as stack:
        for number in (1, 2, 3):
            await stack.enter_async_context(started(prepared, number))
        await declare(prepared)
        async with connect(settings(prepared, "node-n1"), name="n1") as node:
            await node.put(f"$KV.st.n1.{UID}", b"seen")
            with pytest.raises(DeniedError):
                await node.put(f"$KV.st.n2.{UID}", b"x")
            await asyncio.to_thread(prepared.add_node, "n2")
            assert len(await reload_servers(settings(prepared, "sys"))) == 3
            async with connect(settings(prepared, "node-n2"), name="n2") as other:
                await other.put(f"$KV.st.n2.{UID}", b"seen")
                assert node.generation == 1
                withdrawn = tmp_path / "withdrawn.creds"
                withdrawn.write_bytes(prepared.creds("node-n2").read_bytes())
                prepared.remove_node("n2")
                await reload_servers(settings(prepared, "sys"))
                async with asyncio.timeout(60):
                    while other.connected:
                        await asyncio.sleep(0.05)
            with pytest.raises(DeniedError, match="credentials"):
                async with connect(BusSettings(creds=withdrawn), name="thief"):
                    pass
        async with connect(settings(prepared, "controller"), name="c") as controller:
            assert {one.replicas for one in await controller.report()} == {3}


@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.parametrize("user", ["node-n1", "imaged-n1", "netd-n1"])
async def test_stolen_credentials_are_cut_off_and_the_node_continues_with_new_ones(
    tmp_path: Path, user: str
) -> None:
    """BUS-12, F39: under load, for every holder on every host."""
    prepared = made(tmp_path, [["127.0.0.1", "localhost"]], ["n1", "n2"])
    stolen = tmp_path / "stolen.creds"
    stolen.write_bytes(prepared.creds(user).read_bytes())
    revoke = ["bus", "revoke-node", "n1", "--dir", str(prepared.base)]
    async with started(prepared, 1), AsyncExitStack() as stack:
        await declare(prepared)
        thief = await stack.enter_async_context(connect(BusSettings(creds=stolen), name="thief"))
        other = await stack.enter_async_context(connect(settings(prepared, "node-n2"), name="n2"))
        own = await stack.enter_async_context(connect(settings(prepared, user), name="own"))
        tasks = await stack.enter_async_context(background())
        tasks.start(keep_writing(other))
        assert await asyncio.to_thread(main, revoke) == 0
        assert not prepared.withdrawn("n1").exists()
        async with asyncio.timeout(60):
            while thief.connected:
                await asyncio.sleep(0.05)
        with pytest.raises(DeniedError, match="credentials"):
            async with connect(BusSettings(creds=stolen), name="thief again"):
                pass
        async with asyncio.timeout(60):  # by its new file, without a restart
            while own.generation < 2 or not own.connected:
                await asyncio.sleep(0.05)
        tasks.cancel()
        assert other.generation == 1, "nobody else is cut off"


async def keep_writing(bus: NatsBus) -> None:
    while True:
        await bus.put(f"$KV.st.n2.{UID}", b"seen")


@pytest.mark.integration
async def test_a_server_of_another_bus_is_refused_with_the_cause(tmp_path: Path) -> None:
    """SEC-04: another CA, an expired certificate, another host's name; clients name the cause."""
    prepared = made(tmp_path, [["127.0.0.1"]], [])
    certificate_authority.ensure_ca(tmp_path / "other")
    pair = prepared.folder(1) / "server"

    def again(ca: Path, name: str, days: int) -> None:
        pair.with_suffix(".crt").unlink()
        certificate_authority.ensure_server(ca, pair, [name], days)

    wrong = {
        "self.signed|unable to get local issuer": (tmp_path / "other", "127.0.0.1", 9),
        "expired": (prepared.base / "ca", "127.0.0.1", 0),
        "mismatch|not valid for": (prepared.base / "ca", "elsewhere.example", 9),
    }
    for said, (ca, name, days) in wrong.items():
        again(ca, name, days)
        async with started(prepared, 1):
            for _ in range(100):
                if (prepared.base / "1.log").exists():
                    break
                await asyncio.sleep(0.05)
            with pytest.raises(BusError, match=rf"(?i){said}"):
                async with connect(settings(prepared, "client"), name="c"):
                    pass
            access = find(None, str(prepared.creds("client")), {})
            with pytest.raises(LinkError, match=rf"(?i){said}"):
                await asyncio.to_thread(Connection.open, access)


@pytest.mark.integration
async def test_the_health_check_speaks_tls_and_nkeys(tmp_path: Path) -> None:
    prepared = made(tmp_path, [["127.0.0.1"]], [])
    creds, asks = str(prepared.creds("client")), "$SRV.PING.one"
    parse = health.parser().parse_args
    async with started(prepared, 1):
        await declare(prepared)
        assert await health.unhealthy(parse([creds])) == ""
        assert await health.unhealthy(parse([creds, "--asks", asks])) == f"nobody listens on {asks}"
        one = ServiceInfo("one", "1.0.0", "a service of this test")
        async with connect(settings(prepared, "controller"), name="c") as bus, bus.serve(one, []):
            assert await health.unhealthy(parse([creds, "--asks", asks])) == ""
        content = json.loads(prepared.creds("client").read_text())
        prepared.creds("client").write_text(json.dumps(content | {"nkey_seed": nkeys.new_seed()}))
        assert "refuses these credentials" in await health.unhealthy(parse([creds]))
    assert await health.unhealthy(parse([creds]))


@pytest.mark.integration
async def test_the_commands_own_client_speaks_tls_and_nkeys(tmp_path: Path) -> None:
    prepared = made(tmp_path, [["127.0.0.1"]], [])
    async with started(prepared, 1):
        await declare(prepared)
        access = find(None, str(prepared.creds("client")), {})
        connection = await asyncio.to_thread(Connection.open, access)
        assert connection.server["tls_required"]
        connection.close()
