"""Logins of disks: libvirt knows a secret only while a guest starts, and nobody else ever does."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import libvirt
import pytest

from virtbus.nodeagent.core.servers.port import Login
from virtbus.nodeagent.edge import libvirt_logins
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.libvirt_logins import PREFIX, LibvirtLogins
from virtbus.schemas.errors import Code, VirtbusError

ID, OTHER = "0192f0c1-2d3e-5abc-8def-0123456789cc", "0192f0c1-2d3e-5abc-8def-0123456789cd"
KEY = "AQDnotreallyakeyofCephatall00000000000=="


class Secret:
    """A secret in libvirtd's memory."""

    def __init__(self, held: "dict[str, Secret]", xml: str) -> None:
        self.xml = ET.fromstring(xml)
        self._held = held
        self.value = b""
        held[self.UUIDString()] = self

    def UUIDString(self) -> str:  # noqa: N802  libvirt's own names
        return str(self.xml.findtext("uuid"))

    def usageID(self) -> str:  # noqa: N802
        return "".join(self.xml.findall("usage")[0].itertext())

    def setValue(self, value: bytes) -> None:  # noqa: N802
        self.value = value

    def undefine(self) -> None:
        if self._held.pop(self.UUIDString(), None) is None:
            raise libvirt.libvirtError("no such secret")


class Libvirtd:
    """The links to a libvirtd that has only secrets."""

    def __init__(self) -> None:
        self.held: dict[str, Secret] = {}
        self.down = False

    async def run(self, work: Callable[[Any], Any], _doing: str, *, timeout_s: float) -> Any:
        assert timeout_s
        if self.down:
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirtd is down")
        return work(self)

    def secretDefineXML(self, xml: str) -> Secret:  # noqa: N802
        return Secret(self.held, xml)

    def listAllSecrets(self) -> list[Secret]:  # noqa: N802
        return list(self.held.values())

    def of_somebody(self) -> Secret:
        xml = f"<secret><uuid>{OTHER}</uuid><usage type='iscsi'><target>x</target></usage></secret>"
        return Secret(self.held, xml)

    @property
    def logins(self) -> LibvirtLogins:
        return LibvirtLogins(cast("LibvirtLinks", self))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hunter2hunter2\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def login(file: Path, kind: str = "iscsi") -> Login:
    return Login(kind, "virtbus", str(file), ID)


async def test_libvirt_knows_a_secret_only_while_it_is_lent(file: Path) -> None:
    libvirtd = Libvirtd()
    other = libvirtd.of_somebody()
    async with libvirtd.logins.lent([login(file)]):
        secret = libvirtd.held[ID]
        assert secret.value == b"hunter2hunter2"
        assert secret.xml.attrib == {"ephemeral": "yes", "private": "yes"}
        assert secret.xml.find("usage/target") is not None
        assert b"hunter2" not in ET.tostring(secret.xml)
    assert libvirtd.held == {OTHER: other}


async def test_a_key_of_ceph_is_decoded_for_libvirt(file: Path) -> None:
    libvirtd = Libvirtd()
    file.write_text(f"{KEY}\n", encoding="utf-8")
    async with libvirtd.logins.lent([login(file, "ceph")]):
        assert len(libvirtd.held[ID].value) == 28
        assert libvirtd.held[ID].xml.find("usage/name") is not None


async def test_a_failed_start_leaves_no_secret(file: Path) -> None:
    libvirtd = Libvirtd()
    with pytest.raises(VirtbusError, match="no such disk"):
        async with libvirtd.logins.lent([login(file)]):
            raise VirtbusError(Code.CONFLICT, "x", "no such disk")
    assert not libvirtd.held


async def test_a_disk_without_a_login_asks_libvirt_nothing() -> None:
    libvirtd = Libvirtd()
    libvirtd.down = True
    async with libvirtd.logins.lent([]):
        pass


async def test_a_secret_that_a_dead_agent_left_is_removed_by_the_next(file: Path) -> None:
    libvirtd = Libvirtd()
    other = libvirtd.of_somebody()
    async with libvirtd.logins.lent([login(file)]):
        await libvirtd.logins.sweep()
        assert libvirtd.held == {OTHER: other}


async def test_a_sweep_leaves_secrets_that_are_lent(file: Path) -> None:
    libvirtd = Libvirtd()
    logins = libvirtd.logins
    async with logins.lent([login(file)]):
        await logins.sweep()
        assert ID in libvirtd.held
    assert not libvirtd.held


async def test_a_sweep_is_repeated_until_libvirt_answers(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_logins, "AGAIN_S", 0.0)
    libvirtd = Libvirtd()
    async with libvirtd.logins.lent([login(file)]):
        libvirtd.down = True
        async with asyncio.TaskGroup() as group:
            sweep = group.create_task(libvirtd.logins.sweep())
            await asyncio.sleep(0.01)
            assert not sweep.done()
            libvirtd.down = False
        assert not libvirtd.held


async def test_a_libvirtd_that_is_down_loses_the_secret_by_itself(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    libvirtd = Libvirtd()
    with caplog.at_level(logging.WARNING):
        async with libvirtd.logins.lent([login(file)]):
            libvirtd.down = True
    assert "may still have a login" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "content", "mode", "why"),
    [
        ("iscsi", "", 0o600, "it is empty"),
        ("iscsi", "hunter2", 0o640, "mode 0600"),
        ("iscsi", None, 0o600, "No such file"),
        ("ceph", "[client.virtbus]\nkey = x\n", 0o600, "ceph auth get-key"),
    ],
)
async def test_a_file_without_a_usable_secret_is_refused_with_the_next_step(
    file: Path, kind: str, content: str | None, mode: int, why: str
) -> None:
    libvirtd = Libvirtd()
    if content is None:
        file.unlink()
    else:
        file.write_text(content, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(VirtbusError, match=why) as refused:
        async with libvirtd.logins.lent([login(file, kind)]):
            pytest.fail("it was lent")
    assert refused.value.reason == "login_unreadable"
    assert "hunter2" not in str(refused.value)
    assert not libvirtd.held


async def test_a_secret_in_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(VirtbusError, match="must be a file"):
        async with Libvirtd().logins.lent([login(path)]):
            pytest.fail("it was lent")


def test_the_usage_says_whose_secret_it_is() -> None:
    assert PREFIX.startswith("virtbus ")
