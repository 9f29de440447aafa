"""VMs leave a fenced node, and the node returns."""

import asyncio

from services.controller.tests.fleets import uid
from services.controller.tests.test_departures import FREE, POWERED_OFF, Site, _gone, _joined, site
from services.controller.tests.test_vm_api import refused

from virtbus.schemas.states import VmState


@site()
async def test_silence_alone_moves_nothing(there: Site) -> None:
    async with there.host("n2").on():
        async with there.host("n1").on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
            error = await refused(there.node("fence", "n1", confirm=POWERED_OFF))
            assert error.reason == "node_answers"
        await asyncio.sleep(3600)
        assert there.guests.running == {}
        assert (await there.made.vm("get", uid=uid(1))).state is VmState.UNKNOWN
        error = await refused(there.made.ask("move", uid=uid(1)))
        assert error.reason == "node_silent"


@site()
async def test_vms_of_a_fenced_node_run_elsewhere_and_the_rest_show_the_reason(there: Site) -> None:
    async with there.host("n2").on():
        async with there.host("n1").on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.vm(2, "n1")
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        await there.node("fence", "n1", confirm=POWERED_OFF)
        await there.runs_on(1, "n2")
        (shown,) = (await there.node("get", "n1")).vms
        assert (shown.name, shown.state) == ("vm2", VmState.UNKNOWN)
        assert "--discard-local-disks" in shown.eviction_blocked_reason
        view = await there.made.vm("get", uid=uid(2))
        assert view.reason == "node_fenced"
        assert "virtbus vm move vm2 --discard-local-disks" in view.message
        await there.made.ask("move", uid=uid(2), discard_local_disks=True)
        await there.runs_on(2, "n2")


@site()
async def test_a_returned_fenced_node_starts_nothing_moved_and_rejoins_by_unfence(
    there: Site,
) -> None:
    """F21, F25: it starts nothing, cleans moved VMs up, and then takes part again."""
    async with there.host("n2").on():
        n1 = there.host("n1")
        async with n1.on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.vm(2, "n1")
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        await there.node("fence", "n1", confirm=POWERED_OFF)
        await there.runs_on(1, "n2")
        error = await refused(there.node("unfence", "n1"))
        assert error.reason == "node_silent"
        assert n1.disks == {uid(1): 1, uid(2): 1}
        async with n1.on():
            await asyncio.sleep(5)
            assert n1.disks == {uid(2): 1}
            assert there.guests.running == {uid(1): "n2"}
            assert (await there.made.vm("create", name="new", image="tiny")).node == "n2"
            await there.node("unfence", "n1")
        async with n1.on():
            await there.runs_on(2, "n1")


@site()
async def test_a_node_that_comes_back_right_before_its_fence_keeps_its_vms(there: Site) -> None:
    async with there.host("n2").on():
        n1 = there.host("n1")
        async with n1.on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        there.made.buses["c1"].disconnect()  # it does not see that n1 is back
        async with n1.on():
            await there.runs_on(1, "n1")
            there.made.buses["c1"].reconnect()
            node_spec = await refused(there.node("fence", "n1", confirm=POWERED_OFF))
            assert node_spec.reason == "node_answers"
            await asyncio.sleep(120)
            assert there.guests.started == [(uid(1), "n1")] * 2


@site()
async def test_a_node_that_started_its_vms_in_the_moment_of_its_fence_keeps_them(
    there: Site,
) -> None:
    """It listed before the fence was written, and its heartbeat comes later: nothing is moved."""
    async with there.host("n2").on():
        n1 = there.host("n1")
        async with n1.on():
            await _joined(there, "n1")
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        await asyncio.sleep(30)
        n1.first_beat_s = 4.0
        async with n1.on():
            await there.runs_on(1, "n1")
            await there.node("fence", "n1", confirm=POWERED_OFF)
            await asyncio.sleep(120)
            assert there.guests.running == {uid(1): "n1"}
            assert (await there.record(1)).node == "n1"


@site()
async def test_a_delete_on_a_fenced_node_ends_and_nothing_comes_back(there: Site) -> None:
    n1 = there.host("n1")
    async with n1.on():
        await _joined(there, "n1")
        await there.vm(1, "n1")
    await asyncio.sleep(30)
    await there.made.ask("delete", uid=uid(1))
    await there.node("fence", "n1", confirm=POWERED_OFF)
    await there.until(lambda: _gone(there, 1))
    async with n1.on():
        await there.until(lambda: n1.disks == {})
        assert there.guests.running == {}
