"""Kills netd at every step of attach and release; the next one continues from the host."""

import _thread
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from types import FrameType
from typing import Any

import pytest
from services.netd.tests.pretended_host import Host, Node, eventually
from services.netd.tests.test_cni import (
    bridge,
    conflist,
    forget_rules,
    leases,
    plugin,
    rules,
    runs,
    without_bridge,
)

from virtbus.netd.attachments import Attachments
from virtbus.netd.core.names import netns
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.node_rpc import ANY_EPOCH, NetPhase

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Address("10.127.0.1")
STEPS = {"send", "ioctl", "replace", "unlink", "_call", "write_sysctl", "make_and_enter", "bind"}
CNI_STEPS = {"replace", "unlink", "make_and_enter", "run", "_listen", "wait", "read_result"}
"""The differences with plugins: before, during and after each, and its stored result."""


class Killer:
    """A profile function that kills this process at the n-th step, as kill -9 does."""

    def __init__(self, at: int, steps: set[str]) -> None:
        self._left = at
        self._steps = steps

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            name = argument.__name__
        elif event == "call":
            name = frame.f_code.co_name
        else:
            return
        where = str(frame.f_globals.get("__name__", ""))
        if name not in self._steps or not where.startswith(("virtbus.netd", "pathlib")):
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def profiled(killer: Killer) -> Callable[..., int]:
    """Return a start of threads that `in_thread` uses, with `killer` as their profiler."""
    start = _thread.start_new_thread

    def started(work: Callable[..., object], arguments: tuple[object, ...]) -> int:
        def body() -> None:
            sys.setprofile(killer)
            work(*arguments)

        return start(body, ())

    return started


def killed_at(step: int, work: Callable[[], Awaitable[object]], steps: set[str] = STEPS) -> bool:
    """Run `work` in a child that dies at `step`; return False if it finished."""
    pid = os.fork()
    if pid == 0:
        killer = Killer(step, steps)
        _thread.start_new_thread = profiled(killer)
        sys.setprofile(killer)
        try:
            asyncio.run(work())  # type: ignore[arg-type]  # any awaitable of ours is a coroutine
        except BaseException:  # noqa: BLE001  # the child may not return into pytest
            os._exit(3)
        os._exit(0)
    _pid, status = os.waitpid(pid, 0)
    assert status in {0, signal.SIGKILL}, status
    return status == signal.SIGKILL


async def attach(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A)
    node.stop()


async def release(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attachments.release(A, 1)
    await node.attachments.tidy()


async def all_is_well(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
    node.stop()


async def gone(host: Host, *, census: dict[str, Any]) -> None:
    node = Node(host)
    await node.start()
    await node.end()
    left = host.census()
    assert {name: left[name] for name in left if name != "fds"} == {
        name: census[name] for name in census if name != "fds"
    }


def test_after_a_kill_at_any_step_of_attach_the_next_attach_works_and_release_leaves_nothing(
    host: Host,
) -> None:
    before = host.census()
    step = 0
    while killed_at(step := step + 1, lambda: attach(host)):
        asyncio.run(all_is_well(host))
        asyncio.run(gone(host, census=before))
    assert step > 20
    asyncio.run(gone(host, census=before))


def test_after_a_kill_at_any_step_of_release_the_next_leaves_nothing(host: Host) -> None:
    before = host.census()
    step = 0
    asyncio.run(attach(host))
    while killed_at(step := step + 1, lambda: release(host)):
        asyncio.run(all_is_well(host))
    assert step > 10
    asyncio.run(gone(host, census=before))


def cni_on(host: Host) -> None:
    node = Node(host)
    conflist(node, "lan", bridge(node), {"type": "firewall"})


async def attach_cni(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A, networks=("lan",))
    node.stop()


async def cni_is_well(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A, networks=("lan",))
    async with node.guest(A) as guest:
        await guest.ping(IPv4Address("10.88.0.1"))
    assert len(leases(node)) == 1
    node.stop()


async def cni_gone(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attachments.release(A, 1)
    assert leases(node) == []
    assert host.namespaces.names() == []
    assert A not in rules()
    node.stop()


def forget_cni() -> None:
    without_bridge()
    forget_rules()


def test_after_a_kill_at_any_step_of_a_cni_attach_the_next_works_and_release_leaves_no_lease(
    host: Host,
) -> None:
    cni_on(host)
    step = 0
    while killed_at(step := step + 1, lambda: attach_cni(host), CNI_STEPS):
        if step % 2:
            asyncio.run(cni_is_well(host))
        asyncio.run(cni_gone(host))
    assert step > 8
    asyncio.run(cni_gone(host))
    forget_cni()


def test_after_a_kill_at_any_step_of_a_cni_release_no_address_is_given_twice(host: Host) -> None:
    cni_on(host)
    step = 0
    asyncio.run(attach_cni(host))
    while killed_at(step := step + 1, lambda: release(host), CNI_STEPS):
        asyncio.run(cni_is_well(host))
    assert step > 5
    asyncio.run(cni_gone(host))
    forget_cni()


def test_a_plugin_that_outlives_netd_is_ended_before_its_effects_are_reverted(host: Host) -> None:
    node = Node(host)
    late = "sleep 60; touch $0.late"
    plugin(node, "slow", f'if [ "$CNI_COMMAND" = ADD ]; then echo $$ > $0.pid; {late}; fi')
    conflist(node, "lan", bridge(node), {"type": "slow"})
    pid_file = host.tmp / "cni-bin" / "slow.pid"

    async def killed_while_the_plugin_works() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(attach_cni(host))
            await eventually(lambda: pid_file.exists() and bool(pid_file.read_text()))
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed_at(0, killed_while_the_plugin_works)
    assert runs(pid_file.read_text().strip())
    asyncio.run(cni_gone(host))
    assert not runs(pid_file.read_text().strip())
    forget_cni()


async def test_a_running_guest_does_not_notice_a_restart(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        await node.restart()
        await guest.ping(GATEWAY)
        state = node.attachments.state_of(A)
        assert state is not None
        assert state.phase is NetPhase.READY


async def test_until_it_has_recovered_all_work_is_refused(node: Node) -> None:
    node.attachments.recovering = True
    for work in (node.attach(A), node.attachments.release(A, 1), node.attachments.take_taps(A, 1)):
        with pytest.raises(VirtbusError, match="comparing its state") as refused:
            await work
        assert (refused.value.code, refused.value.body.after_ms) == (503, 500)
    node.attachments.recovering = False


async def test_stopping_before_recovery_removes_no_bridge(node: Node) -> None:
    await node.attach(A)
    await Attachments(node.doors, node.site).tidy()
    assert "virtbus0" in node.host.census()["links"]


async def test_namespaces_without_a_state_file_are_foreign_and_survive_recovery_and_release(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    await node.attach(A)
    await node.attach(B)
    file = node.state_dir / "netd/vms" / f"{B}.json"
    text = file.read_text()
    node.doors.files.remove(B)
    foreign = node.host.namespaces.path("cni-1234")
    foreign.touch()
    await node.restart()
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
        f"{netns(B)} belongs to another netd; it is left alone"
    ]
    assert not await node.attachments.release(B, 1)
    assert node.host.census()["netns"] == ["cni-1234", netns(A), netns(B)]
    assert set(node.attachments.resources()) == {A}
    foreign.unlink()
    file.write_text(text)
    await node.restart()


async def test_a_state_file_torn_by_a_power_loss_is_forgotten(node: Node) -> None:
    await node.attach(A)
    (node.host.tmp / "state/netd/vms" / f"{B}.json").write_text("")
    await node.restart()
    assert set(node.attachments.resources()) == {A}


@pytest.mark.parametrize(
    ("version", "says"), [(9, "install the newer virtbus"), (1, r"upgrade-from-0\.1")]
)
async def test_state_of_another_version_is_refused_with_the_next_step(
    node: Node, version: int, says: str
) -> None:
    await node.attach(A)
    path = node.host.tmp / "state/netd/vms" / f"{A}.json"
    text = path.read_text()
    written = f'"schema_version":{SCHEMA_VERSION}'
    assert written in text
    path.write_text(text.replace(written, f'"schema_version":{version}'))
    with pytest.raises(VirtbusError, match=says):
        await node.restart()
    path.write_text(text)
    await node.restart()


async def test_a_second_netd_on_the_same_state_is_refused(node: Node) -> None:
    with pytest.raises(VirtbusError, match="another virtbus-netd works in"):
        await Node(node.host).start()


async def test_a_filter_that_somebody_removed_is_back_after_recovery(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        node.inside(A, "nft delete table netdev virtbus; ip link set eth0 nomaster")
        await node.restart()
        assert "policy drop" in node.inside(A, "nft list ruleset")
        await guest.ping(GATEWAY)


async def test_release_of_an_unknown_vm_does_nothing(node: Node) -> None:
    assert not await node.attachments.release(A, 1)
    await node.attach(A, epoch=2)
    assert await node.attachments.release(A, 2)
    assert not await node.attachments.release(A, 2)


async def test_a_record_that_comes_after_its_release_makes_nothing(node: Node) -> None:
    await node.attach(A)
    before = node.host.census()
    assert await node.attachments.release(A, 1)
    with pytest.raises(VirtbusError, match="was released"):
        await node.attach(A)
    assert A not in node.attachments.resources()
    await node.attach(A, epoch=2)  # assigned again
    assert node.host.census() == before
    assert await node.attachments.release(A, ANY_EPOCH)
    await node.attach(A, epoch=3)  # an audit does not report future objects
