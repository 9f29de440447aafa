"""Allowed addresses of image servers; errors reveal nothing about other addresses."""

import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from services.imaged.tests.registry_under_test import Registry
from services.imaged.tests.site_under_test import NodeMaker, Web, qcow2_image, raw_server
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.core.addresses import refusal
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.settings import Settings
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.image import parse_image_ref

NOT_PUBLIC = [
    *("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::127.0.0.1"),
    *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "::ffff:10.0.0.1"),
    *("100.64.0.1", "100.100.100.200", "198.18.0.1", "192.0.0.192", "168.63.129.16"),
    *("169.254.169.254", "fe80::1", "fe80::1%eth0", "fec0::1", "::ffff:169.254.169.254"),
    *("fc00::1", "fd00:ec2::254", "0.0.0.0", "0.1.2.3", "::"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "ff02::1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1"),
    *("2001::1", "2001:db8::1", "192.0.2.1", "198.51.100.1", "203.0.113.1", "3fff::1", "100::1"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_nothing_is_fetched_from_an_address_that_is_not_public(address: str) -> None:
    assert "image_addresses" in refusal(address, ())


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1", "::ffff:8.8.8.8",
                "64:ff9b::8.8.8.8", "2002:808:808::1"],
)  # fmt: skip
def test_public_addresses_need_no_setting(address: str) -> None:
    assert refusal(address, ()) == ""


def test_a_setting_allows_the_networks_that_it_names_and_no_others() -> None:
    allowed = (ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/64"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00::7", "8.8.8.8"):
        assert refusal(address, allowed) == "", address
    for address in ("10.2.0.1", "127.0.0.1", "fd00:0:0:1::1", "169.254.169.254"):
        assert refusal(address, allowed), address


@given(st.ip_addresses())
def test_every_address_is_judged(address: object) -> None:
    assert isinstance(refusal(str(address), ()), str)


def test_the_default_allows_no_address_that_is_not_public() -> None:
    assert TransferLimits().allowed_addresses == Settings(node="n1").limits.allowed_addresses == ()
    with pytest.raises(ValidationError):
        Settings(node="n1", image_addresses=("10.0.0.1/8",))


async def test_a_server_on_loopback_is_never_connected_to_unless_it_is_allowed(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    registry = Registry(server)
    async with make_node(allowed_addresses=(), registries=registry.known) as node:
        for ref in (server.url("a"), server.url("a").replace("127.0.0.1", "localhost"),
                    registry.ref("team/disk:1")):  # fmt: skip
            error = await refused(node.images, ref)
            assert (error.reason, error.body.retry) == ("image_unreachable", Retry.LATER)
        assert server.requests == []
    allowed = (ipaddress.ip_network("127.0.0.1"),)
    async with make_node(allowed_addresses=allowed) as node:
        await node.images.ensure(parse_image_ref(server.url("a")))


async def test_a_name_is_judged_by_the_address_of_each_connection(
    make_node: NodeMaker, server: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: a public address at the first look-up, another one at the connection."""
    looks: list[str] = []
    true_look = socket.getaddrinfo

    def look(host: Any, *rest: Any, **more: Any) -> Any:
        if host != "rebound.example":
            return true_look(host, *rest, **more)
        looks.append(host)
        address = ("127.0.0.1", int(server.base.rpartition(":")[2]))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    async with make_node(allowed_addresses=(), attempts=3) as node:
        url = server.url("a").replace("127.0.0.1", "rebound.example")
        assert (await refused(node.images, url)).reason == "image_unreachable"
    assert len(looks) == 3
    assert server.requests == []


@contextlib.contextmanager
def _closed_port() -> Iterator[int]:
    """Reserve a port without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.asynccontextmanager
async def _targets() -> AsyncIterator[tuple[dict[str, str], dict[str, str]]]:
    """URLs that must be indistinguishable for a client: allowed addresses, and others."""
    async with (
        raw_server(b"SSH-2.0-OpenSSH\r\n\r\n") as ssh,
        raw_server(b"") as mute,
        raw_server(b"", hang=True) as silent,
    ):
        with _closed_port() as closed:
            allowed = {
                "closed": f"http://127.0.0.1:{closed}/a",
                "no web server": f"{ssh}/a",
                "hangs up": f"{mute}/a",
                "silent": f"{silent}/a",
                "no TLS": f"{ssh}/a".replace("http:", "https:"),
                "no such name": "http://nowhere.invalid/a",
            }
            others = {
                "closed": f"http://127.0.0.1:{closed}/a",
                "open": f"{ssh}/a",
                "by name": f"{ssh}/a".replace("127.0.0.1", "localhost"),
                "no such name": "http://nowhere.invalid/a",
                "metadata": "http://169.254.169.254/a",
            }
            yield allowed, others


async def test_refusals_do_not_tell_ports_addresses_or_names_apart(
    make_node: NodeMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with _targets() as (allowed, others):
        for urls, more in ((allowed, {}), (others, {"allowed_addresses": ()})):
            said = {}
            async with make_node(attempts=2, **more) as node:
                for kind, url in urls.items():
                    error = await refused(node.images, url)
                    said[kind] = _without_url(error, url)
            assert len(set(said.values())) == 1, said
    logged = {record.getMessage() for record in caplog.records}
    assert any("connection refused" in line for line in logged)
    assert any("cannot be resolved" in line for line in logged)
    assert any("127.0.0.1 is no public address" in line for line in logged)


def _without_url(error: VirtbusError, url: str) -> tuple[int, str, str, str]:
    body = error.body
    return body.code, body.reason, body.retry, body.message.replace(url, "URL")
