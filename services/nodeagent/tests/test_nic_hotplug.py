"""NICs that are plugged into and unplugged from a running guest, over deaths of the agent."""

from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.core.guest_nics import alias_of, domain_nics, interface_xml
from virtbus.nodeagent.core.metadata import NAMESPACE
from virtbus.nodeagent.vm.operations import nics as nic_changes
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import InterfaceStatus, LinkState, PlugState
from virtbus.schemas.nic import NicModel
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node_rpc import Ensure, NetPhase, NetReady
from virtbus.schemas.vm import Interface, VmRecord
from virtbus.schemas.vm_status import Condition
from virtbus.simulator.services import SimulatedNode

A = uid(1)
MAC = "02:00:00:00:00:{:02x}"


class Wires:
    """netd's memory of one VM's interfaces, which outlives the agent."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.states: dict[str, PlugState] = {}
        self.steps: list[str] = []
        self.errors: dict[str, VirtbusError] = {}

    def reported(self, wanted: list[str]) -> list[InterfaceStatus]:
        """Compare the record with the guest, as netd does."""
        facts = self.node.domains.there.get(A)
        if facts is None or not facts.active:
            self.states = dict.fromkeys(wanted, PlugState.PLUGGED)
        for name in self.states.keys() - set(wanted):
            self.states[name] = PlugState.LEAVING
        for name in wanted:
            here = self.states.setdefault(name, PlugState.WAITING)
            self.states[name] = PlugState.PLUGGED if here is PlugState.LEAVING else here
        order = [*wanted, *(name for name in self.states if name not in wanted)]
        return [_interface(name, self.states[name]) for name in order]

    def nic(self, want: NicWork) -> NicDone:
        if (error := self.errors.pop(want.do, None)) is not None:
            raise error
        self.steps.append(f"{want.do} {want.name}")
        if want.do == "join":
            self.states[want.name] = PlugState.PLUGGED
        if want.do == "drop":
            del self.states[want.name]
        return NicDone(uid=want.uid, name=want.name, mac=MAC.format(9), tap=f"vt{want.name}")


class HotNode(Node):
    """A node whose netd plugs NICs as the real one does."""

    wires: Wires


def _interface(name: str, plug: PlugState) -> InterfaceStatus:
    return InterfaceStatus(name=name, mac=MAC.format(int(name[-1])), plug=plug)


@pytest.fixture
def node(tmp_path: Path) -> HotNode:
    made = HotNode(tmp_path)
    wires = Wires(made)

    class Services(SimulatedNode):
        def answers_of(self, service: str) -> Any:
            found = dict(super().answers_of(service))
            return found | ({"nic": (NicWork, wires.nic)} if service == "netd" else {})

        def net(self, want: Ensure) -> NetReady:
            if want.record.uid != A:
                return super().net(want)
            nics = [nic.name for nic in want.record.spec.domain.devices.interfaces]
            return NetReady(
                uid=A,
                epoch=want.record.epoch,
                generation=want.record.generation,
                phase=NetPhase.READY,
                interfaces=tuple(wires.reported(nics)),
            )

    made.services = Services
    made.wires = wires
    return made


def with_nics(*names: str, generation: int = 1, **more: Any) -> VmRecord:
    spec = {
        "domain": {"devices": {"interfaces": [{"name": name, **more} for name in names]}},
        "networks": [{"name": name} for name in names],
    }
    return record(spec=spec, generation=generation)


async def condition(node: HotNode, kind: str) -> Condition | None:
    found = await node.status(A)
    conditions = found.conditions if found is not None else ()
    return next((one for one in conditions if one.type == kind), None)


def nics(node: HotNode) -> list[str]:
    return node.domains.devices.nics(A)


async def test_a_nic_is_plugged_and_unplugged_while_the_guest_runs(node: HotNode) -> None:
    await node.join()
    await node.put(with_nics("net0"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert node.wires.steps == []
        await node.put(with_nics("net0", "net1", generation=2))
        await eventually(lambda: node.wires.steps == ["lend net1", "join net1"])
        assert nics(node) == ["0", "net1"]
        await node.put(with_nics("net0", generation=3))
        await eventually(lambda: node.wires.steps[2:] == ["drop net1"])
        assert nics(node) == ["0"]
        assert await condition(node, "RestartRequired") is None
        assert node.domains.done.count(("start", A)) == 1


async def test_a_nic_of_the_start_is_unplugged_and_another_one_takes_its_name(
    node: HotNode,
) -> None:
    await node.join()
    await node.put(with_nics("net0", "net1"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(with_nics("net1", generation=2))
        await eventually(lambda: node.wires.steps == ["drop net0"])
        assert nics(node) == ["1"]
        await node.put(with_nics("net0", "net1", generation=3))
        await eventually(lambda: nics(node) == ["1", "net0"])
        await node.put(with_nics("net1", generation=4))
        await eventually(lambda: node.wires.steps[-1] == "drop net0")
        assert nics(node) == ["1"]


async def test_a_silent_guest_is_shown_and_asked_again(
    node: HotNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic_changes, "RELEASE_S", 0.1)
    await node.join()
    await node.put(with_nics("net0", "net1"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.devices.silent = True
        await node.put(with_nics("net0", "net2", generation=2))

        async def said() -> Condition | None:
            return await condition(node, "NicChangePending")

        shown = await eventually(said)
        assert (shown.reason, "'net1'" in shown.message) == ("NotReleased", True)
        assert node.wires.steps == ["lend net2", "join net2"], "the other NIC does not wait"
        node.domains.devices.silent = False
        await eventually(lambda: node.wires.steps[2:] == ["drop net1"])
        assert node.domains.done.count(("detach 1", A)) >= 2

        async def settled() -> bool:
            return await said() is None

        await eventually(settled)


@pytest.mark.parametrize("step", ["lend", "attach", "join", "drop"])
async def test_an_agent_that_dies_at_a_step_is_continued_by_the_next(
    node: HotNode, step: str
) -> None:
    broken = VirtbusError(Code.UNAVAILABLE, "test_fault", "a fault of the test")
    await node.join()
    await node.put(with_nics("net0"))

    def break_at(error: VirtbusError | None) -> None:
        for errors in (node.wires.errors, node.domains.devices.errors):
            errors.pop(step, None)
            if error is not None:
                errors[step] = error

    async with node.agent():
        await eventually(in_state(node, "Running"))
        if step == "drop":
            await node.put(with_nics("net0", "net1", generation=2))
            await eventually(lambda: nics(node) == ["0", "net1"])
            await eventually(lambda: node.wires.states["net1"] is PlugState.PLUGGED)
        break_at(broken)
        wanted = ("net0",) if step == "drop" else ("net0", "net1")
        await node.put(with_nics(*wanted, generation=3))

        async def failed() -> bool:
            return await condition(node, "NicChangePending") is not None

        await eventually(failed)
    break_at(None)
    async with node.agent():
        await eventually(
            lambda: (
                set(node.wires.states) == set(wanted)
                and set(node.wires.states.values()) == {PlugState.PLUGGED}
            )
        )
        assert nics(node) == ["0"] + ["net1"] * (step != "drop")
        await eventually(in_state(node, "Running"))
    assert node.domains.done.count(("start", A)) == 1
    assert node.domains.done.count(("attach", A)) == 1


async def test_a_guest_without_a_free_slot_needs_a_restart(node: HotNode) -> None:
    await node.join()
    await node.put(with_nics("net0"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(with_nics(*(f"net{n}" for n in range(6)), generation=2))

        async def shown() -> bool:
            found = await condition(node, "RestartRequired")
            return found is not None and "no free slot" in found.message

        await eventually(shown)
        assert nics(node) == ["0", "net1", "net2", "net3", "net4"]


async def test_other_properties_of_a_plugged_nic_need_a_restart(node: HotNode) -> None:
    await node.join()
    await node.put(with_nics("net0"))

    async def required() -> bool:
        return await condition(node, "RestartRequired") is not None

    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(with_nics("net0", "net1", generation=2))
        await eventually(lambda: nics(node) == ["0", "net1"])
        assert not await required()
    await node.put(with_nics("net0", "net1", generation=3, mtu=1400))
    async with node.agent(MemoryBus(node.server, "another")):
        await eventually(required)


def test_a_device_has_the_lent_tap_and_the_given_slot() -> None:
    nic = Interface(name="lan-1", model=NicModel.VIRTIO, state=LinkState.DOWN, acpi_index=4)
    made = NicDone(uid=A, name="lan-1", mac=MAC.format(1), mtu=1400, queues=2, tap="vt0")
    text = interface_xml(nic, made, 7)
    assert text == (
        '<interface type="ethernet"><mac address="02:00:00:00:00:01" />'
        '<target dev="vt0" managed="no" /><model type="virtio" />'
        '<driver queues="2" /><link state="down" /><mtu size="1400" />'
        f'<alias name="{alias_of(nic)}" /><rom enabled="no" /><acpi index="4" />'
        '<address type="pci" domain="0x0000" bus="0x07" slot="0x00" function="0x0" />'
        "</interface>"
    )
    port = '<controller type="pci" index="7" model="pcie-root-port"/>'
    domain = f"<domain><name>{domain_name(A)}</name><devices>{port}{text}</devices></domain>"
    found = domain_nics(domain)
    assert list(found.plugged) == ["lan-1"]
    assert found.free_ports == ()
    ours = f'<v:vm xmlns:v="{NAMESPACE}"><nics>net0:0a net1:0b</nics></v:vm>'
    port = '<controller type="pci" index="{}" model="pcie-root-port"/>'
    ports = "".join(port.format(number) for number in (1, 2, 3))
    xml = f"<domain><metadata>{ours}</metadata><devices>{ports}</devices></domain>"
    assert [name for name, _ in domain_nics(xml).started] == ["net0", "net1"]
    assert domain_nics(xml).free_ports == (3,), "libvirt does not know who has the others"
    e1000 = interface_xml(Interface(name="x", model=NicModel.E1000), made, 7)
    assert "driver" not in e1000
    assert "mtu" not in e1000
