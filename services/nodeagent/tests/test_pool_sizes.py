"""Sizes of places that only QEMU can ask for: answers are judged, and nothing waits for them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from xml.etree import ElementTree as ET

import libvirt
import pytest
from services.nodeagent.tests.test_logins import Libvirtd
from services.nodeagent.tests.test_network_disks import REF, greeting, iscsi, nfs, san, server

from virtbus.bus.runtime.pool_settings import PoolSettings, ServerPool
from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.known_sizes import KnownSizes
from virtbus.nodeagent.edge import libvirt_sizes, pool_servers
from virtbus.nodeagent.edge.libvirt_errors import translated
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.libvirt_sizes import LibvirtSizes
from virtbus.nodeagent.edge.pool_servers import Ask, PoolServers
from virtbus.schemas.disk import DISK_MAX
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.pool import MESSAGE_MAX, PoolReport, PoolState

MIB = 1024**2
FLAGS = libvirt.VIR_DOMAIN_START_PAUSED | libvirt.VIR_DOMAIN_START_AUTODESTROY
LIMITS = {"hard_limit": 512 * 1024, "global_quota": 50_000}


class Refused(libvirt.libvirtError):
    """An error of libvirt with a code."""

    def __init__(self, message: str, code: int = libvirt.VIR_ERR_INTERNAL_ERROR) -> None:
        super().__init__(message)
        self._message, self._code = message, code

    def get_error_code(self) -> int:
        return self._code

    def get_error_message(self) -> str:
        return self._message


class Machine:
    """A QEMU of libvirt without a guest, which opens places as `answers` says."""

    def __init__(self, host: "Sizing", xml: str) -> None:
        self.xml = ET.fromstring(xml)
        self.limits: dict[str, int] = {}
        self._host = host
        self._place = ""

    def set_limits(self, limits: dict[str, int], flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        self.limits |= limits

    setMemoryParameters = setSchedulerParametersFlags = set_limits  # noqa: N815  libvirt's names

    def attachDeviceFlags(self, xml: str, _flags: int) -> None:  # noqa: N802
        assert self.limits == LIMITS, "a server is asked behind the limits only"
        assert not self._place, "one place at a time"
        disk = ET.fromstring(xml)
        assert disk.find("readonly") is not None
        self._host.asked.append(xml)
        place = disk.find("source")
        assert place is not None
        answer = self._host.answers[place.attrib["name"]]
        if answer == "dies":
            self._host.machines.clear()
            raise Refused("Unable to read from monitor: Connection reset by peer")
        if isinstance(answer, str):
            raise Refused(answer)
        self._place = place.attrib["name"]

    def detachDeviceFlags(self, _xml: str, _flags: int) -> None:  # noqa: N802
        self._place = ""

    def blockInfo(self, device: str) -> list[int]:  # noqa: N802
        assert device == "sda"
        return [cast("int", self._host.answers[self._place]), 0, 0]

    def isActive(self) -> int:  # noqa: N802
        if self not in self._host.machines.values():
            raise Refused("Domain not found", libvirt.VIR_ERR_NO_DOMAIN)
        return 1

    def destroy(self) -> None:
        for name, machine in list(self._host.machines.items()):
            if machine is self:
                del self._host.machines[name]
        self._host.ended.set()


class Sizing(Libvirtd):
    """A libvirtd that starts such machines."""

    def __init__(self, answers: Mapping[str, int | str]) -> None:
        super().__init__()
        self.answers = answers
        self.machines: dict[str, Machine] = {}
        self.made: list[Machine] = []
        self.asked: list[str] = []
        self.ended = asyncio.Event()

    async def run(self, work: Callable[[Any], Any], doing: str, *, timeout_s: float) -> Any:
        try:
            return await super().run(work, doing, timeout_s=timeout_s)
        except libvirt.libvirtError as error:
            raise translated(error, doing) from error

    def createXML(self, xml: str, flags: int) -> Machine:  # noqa: N802
        assert flags == FLAGS
        made = Machine(self, xml)
        name = str(made.xml.findtext("name"))
        assert name not in self.machines
        self.made.append(made)
        self.machines[name] = made
        return made

    def lookupByName(self, name: str) -> Machine:  # noqa: N802
        if name not in self.machines:
            raise Refused("Domain not found", libvirt.VIR_ERR_NO_DOMAIN)
        return self.machines[name]

    @property
    def sizes(self) -> LibvirtSizes:
        links = cast("LibvirtLinks", self)
        return LibvirtSizes(links, links, self.logins, "n1")


def tls(*places: str) -> ServerPool:
    return san(tls=True, volumes={f"shop.{place}": place for place in places})


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (8 * MIB, 8 * MIB),
        (DISK_MAX, DISK_MAX),
        (DISK_MAX + 1, None),
        (2**64 - 1, None),
        (0, None),
        (-1, None),
        ("unable to execute QEMU command 'blockdev-add': no such export", None),
        ("\x1b[2J" + "x" * 100_000, None),
    ],
)
async def test_only_a_size_that_a_disk_can_have_is_believed(
    answer: int | str, size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    host = Sizing({"a": answer, "b": 5 * MIB})
    with caplog.at_level(logging.WARNING):
        sizes = host.sizes
        for _ in range(2):
            found = await sizes.asked("san", tls("a", "b"))
            assert found == {"shop.b": 5 * MIB} | ({} if size is None else {"shop.a": size})
    assert not host.machines
    assert len(caplog.messages) == (size is None), "the reason is told once"
    assert all("shop.a" in one and len(one) < MESSAGE_MAX + 60 for one in caplog.messages)


async def test_a_machine_that_dies_keeps_the_sizes_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Sizing({"a": MIB, "b": "dies", "c": MIB})
    assert await host.sizes.asked("san", tls("a", "b", "c")) == {"shop.a": MIB}
    assert "sizes of the pool san are unknown" in caplog.text
    assert not host.machines


async def test_a_login_is_lent_for_the_question_only(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2hunter2\n", encoding="utf-8")
    secret.chmod(0o600)
    pool = iscsi(secret_file=str(secret))
    host = Sizing({pool.volumes[REF.key]: 8 * MIB})
    assert await host.sizes.asked("tank", pool) == {REF.key: 8 * MIB}
    (asked,) = host.asked
    assert "<auth" in asked
    assert "hunter2" not in asked
    assert not host.held


@pytest.mark.parametrize(
    ("pool", "label"),
    [
        (iscsi(user="", secret_file=""), "+65534:+65534"),
        (nfs(user=7, group=7), "+65534:+65534"),
        (nfs(), None),
        (tls("one"), None),
    ],
)
async def test_the_machine_is_nobodys_unless_the_server_knows_only_qemus_user(
    pool: ServerPool, label: str | None
) -> None:
    host = Sizing(dict.fromkeys(pool.volumes.values(), MIB))
    assert await host.sizes.asked("san", pool)
    assert host.made[0].xml.findtext("seclabel/label") == label


async def test_a_libvirtd_that_is_down_leaves_sizes_unknown_and_a_sweep_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libvirt_sizes, "AGAIN_S", 0.0)
    host = Sizing({"a": MIB})
    left = host.createXML("<domain><name>virtbus-sizes-n1</name></domain>", FLAGS)
    host.down = True
    assert await host.sizes.asked("san", tls("a")) == {}
    async with asyncio.TaskGroup() as group:
        sweep = group.create_task(host.sizes.sweep())
        await asyncio.sleep(0.01)
        assert not sweep.done()
        assert left in host.machines.values()
        host.down = False
    assert not host.machines
    assert await host.sizes.asked("san", tls()) == {}
    assert len(host.made) == 1, "nothing is started for a pool without places"


async def test_a_server_that_hangs_is_left_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libvirt_sizes, "ASK_S", 0.05)
    host = Sizing({"a": MIB})

    class Hanging(Sizing):
        async def run(self, work: Callable[[Any], Any], _doing: str, *, timeout_s: float) -> Any:
            assert timeout_s > libvirt_sizes.ASK_S
            host.createXML("<domain><name>virtbus-sizes-n1</name></domain>", FLAGS)
            await host.ended.wait()
            raise VirtbusError(Code.NOT_FOUND, "no_domain", "Domain not found")

    asking, ending = (cast("LibvirtLinks", one) for one in (Hanging({}), host))
    sizes = LibvirtSizes(asking, ending, host.logins, "n1")
    async with asyncio.timeout(5):
        assert await sizes.asked("san", tls("a")) == {}
    assert not host.machines
    assert "no answer in" in caplog.text


def test_a_size_that_was_not_confirmed_is_kept_with_its_time() -> None:
    known = KnownSizes()
    assert (known.bytes, known.confirmed_ns(away=True)) == ({}, 0)
    known.confirm({"a": 1, "b": 2}, 10)
    assert (known.bytes, known.confirmed_ns(away=False)) == ({"a": 1, "b": 2}, 0)
    assert known.confirmed_ns(away=True) == 10
    known.confirm({"b": 3}, 20)
    assert (known.bytes, known.confirmed_ns(away=False)) == ({"a": 1, "b": 3}, 10)
    known.confirm({"a": 1, "b": 3}, 30)
    assert (known.confirmed_ns(away=False), known.confirmed_ns(away=True)) == (0, 30)


class Reports:
    """The last reports of a node's pools, by name."""

    def __init__(self) -> None:
        self.of: dict[str, PoolReport] = {}
        self._changed = asyncio.Event()

    def tell(self, _source: str, pools: Iterable[PoolReport]) -> None:
        self.of |= {one.name: one for one in pools}
        self._changed.set()

    async def until(self, name: str, holds: Callable[[PoolReport], object]) -> PoolReport:
        async with asyncio.timeout(10):
            while (found := self.of.get(name)) is None or not holds(found):
                self._changed.clear()
                await self._changed.wait()
        return found


@asynccontextmanager
async def served(pools: Mapping[str, PoolSettings], ask: Ask) -> AsyncIterator[Reports]:
    reports = Reports()
    async with asyncio.TaskGroup() as group:
        servers = PoolServers(pools, reports.tell, AwayServers(), ask, lambda: 7, 0.02)
        running = group.create_task(servers.run())
        yield reports
        running.cancel()


async def test_a_question_that_hangs_delays_no_probe_and_no_other_pool() -> None:
    async def ask(name: str, _pool: ServerPool) -> dict[str, int]:
        if name == "hangs":
            await asyncio.Event().wait()
        return {REF.key: 8 * MIB}

    async with server(greeting(1)) as port:
        pools: dict[str, PoolSettings] = {one: san(port, tls=True) for one in ("hangs", "well")}
        async with served(pools, ask) as reports:
            well = await reports.until("well", lambda one: one.place_bytes)
            assert (well.size_bytes, well.place_bytes) == (8 * MIB, {REF.key: 8 * MIB})
            hangs = await reports.until("hangs", lambda one: one.state is PoolState.READY)
            assert (hangs.size_bytes, hangs.place_bytes) == (0, {})
            assert hangs.assigned == (REF.key,)


async def test_an_unknown_size_is_asked_for_again_and_stays_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(_name: str, _pool: ServerPool) -> dict[str, int]:
        answers.append({REF.key: 8 * MIB} if answers else {})
        return answers[-1]

    answers: list[dict[str, int]] = []
    monkeypatch.setattr(pool_servers, "BY_QEMU_S", (0.01, 100.0))

    async with AsyncExitStack() as serving:
        port = await serving.enter_async_context(server(greeting(1)))
        async with served({"san": san(port, tls=True)}, ask) as reports:
            told = await reports.until("san", lambda one: one.place_bytes)
            assert told.places_confirmed_ns == 0
            await serving.aclose()
            gone = await reports.until("san", lambda one: one.state is PoolState.GONE)
            assert (gone.place_bytes, gone.places_confirmed_ns) == ({REF.key: 8 * MIB}, 7)
            assert gone.size_bytes == 8 * MIB
    assert len(answers) == 2
