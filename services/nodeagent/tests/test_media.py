"""Media of CD-ROM drives are ejected and inserted while their guest runs."""

from pathlib import Path
from typing import Any, cast

import libvirt
import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid
from services.nodeagent.tests.test_guests import Refusal

from virtbus.nodeagent.core.disks import DriveState, drives
from virtbus.nodeagent.core.metadata import domain_hash
from virtbus.nodeagent.edge.libvirt_disks import set_drives
from virtbus.nodeagent.vm.intent import Applied, next_update
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import Condition

A = uid(1)


def tray(state: str | None = None, generation: int = 1, **more: Any) -> VmRecord:
    disks = [
        {"name": "root"},
        {"name": "cd", "bus": "sata", "device": "cdrom", "tray": state},
        {"name": "empty", "bus": "scsi", "device": "cdrom"},
    ]
    volumes = [{"name": name, "empty_disk": {"capacity": "1GiB"}} for name in ("root", "cd")]
    spec = {"domain": {"devices": {"disks": disks}}, "networks": [], "volumes": volumes}
    return record(spec=spec, generation=generation, **more)


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    return made


def medium(node: Node) -> str | None:
    return node.domains.media.get(A, {}).get("sda")


async def pending(node: Node) -> Condition | None:
    found = await node.status(A)
    assert found is not None
    assert "RestartRequired" not in {one.type for one in found.conditions}
    return next((one for one in found.conditions if one.type == "MediaChangePending"), None)


async def test_a_medium_is_ejected_and_inserted_while_the_guest_runs(node: Node) -> None:
    await node.put(tray())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert medium(node) is None, "a start needs no call"
        await node.put(tray("open", 2))
        await eventually(lambda: medium(node) == "")
        await node.put(tray(None, 3))
        await eventually(lambda: (medium(node) or "").endswith("/cd.qcow2"))
        assert node.domains.media[A]["sdb"] == "", "the other drive is empty"
        assert node.domains.done.count(("start", A)) == 1
        assert await pending(node) is None


def test_another_image_of_a_drive_is_a_change_of_its_medium() -> None:
    def image(ref: str, tray: str | None = None) -> VmRecord:
        disk = {"name": "cd", "bus": "scsi", "device": "cdrom", "tray": tray}
        spec = {"domain": {"devices": {"disks": [disk]}}, "networks": []}
        return record(spec=spec | {"volumes": [{"name": "cd", "image": {"ref": ref}}]})

    applied = Applied()
    applied.started(image("a"))
    assert next_update(image("a"), applied, "running") is None
    assert next_update(image("b"), applied, "running") == "update"
    assert next_update(image("b"), applied, "stopped") is None
    assert "update" in applied.events(image("b"), "running")
    assert next_update(image("b"), applied, "running") is None
    assert next_update(image("b", "open"), applied, "running") == "update"
    assert domain_hash(image("a")) == domain_hash(image("b"))


async def test_a_locked_tray_is_shown_and_tried_again_until_it_is_forced(node: Node) -> None:
    await node.put(tray())
    node.domains.locked = {"sda"}
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(tray("open", 2))
        said = await eventually(lambda: pending(node))
        assert (said.reason, said.message) == ("TrayLocked", "the guest locks sda")
        await eventually(lambda: node.domains.done.count(("drives", A)) > 1)
        await node.put(tray("forced-open", 3))
        await eventually(lambda: medium(node) == "")

        async def over() -> bool:
            return await pending(node) is None

        await eventually(over)


async def test_an_ejected_medium_stays_out_at_the_next_start(node: Node) -> None:
    await node.put(tray("open"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
    await node.put(tray(None, 2))
    async with node.agent():
        await eventually(lambda: (medium(node) or "").endswith("/cd.qcow2"))


def test_a_drive_has_the_element_of_its_domain_without_a_medium() -> None:
    opened = drives(tray("forced-open").spec.domain, {}, {"cd": 1})
    assert sorted(opened) == ["sda", "sdb"]
    assert (opened["sda"].path, opened["sda"].force) == ("", True)
    assert 'device="cdrom"' in opened["sda"].xml
    assert '<boot order="1"' in opened["sda"].xml
    assert "<source" not in opened["sda"].xml
    assert domain_hash(tray("open")) == domain_hash(tray())


class Drive:
    """A domain of libvirt with one full drive, whose tray the guest may lock."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.flags: list[int] = []

    def isActive(self) -> bool:  # noqa: N802  libvirt's name
        return True

    def XMLDesc(self) -> str:  # noqa: N802
        disk = '<disk><source file="/a"/><target dev="sda"/></disk>'
        return f"<domain><devices>{disk}</devices></domain>"

    def updateDeviceFlags(self, _xml: str, flags: int) -> int:  # noqa: N802
        self.flags.append(flags)
        if self._text:
            raise Refusal(libvirt.VIR_ERR_OPERATION_FAILED, self._text)
        return 0


@pytest.mark.parametrize(
    "text",
    [
        "operation failed: timed out waiting to open tray of 'sda'",
        "internal error: unable to execute QEMU command 'blockdev-open-tray': Device 'sata0-0-0' "
        "is locked and force was not specified, wait for tray to open and try again",
    ],
)
def test_a_tray_that_the_guest_locks_is_told_from_other_errors(text: str) -> None:
    opened = {"sda": DriveState("<disk />", "", force=False)}
    with pytest.raises(VirtbusError) as caught:
        set_drives(opened, cast("libvirt.virDomain", Drive(text)))
    assert (caught.value.code, caught.value.reason) == (409, "tray_locked")
    with pytest.raises(libvirt.libvirtError):
        set_drives(opened, cast("libvirt.virDomain", Drive("no space left on device")))


def test_only_a_medium_that_differs_is_changed_and_force_is_passed_on() -> None:
    domain = Drive("")
    same = {"sda": DriveState("<disk />", "/a", force=True)}
    set_drives(same, cast("libvirt.virDomain", domain))
    assert domain.flags == []
    forced = {"sda": DriveState("<disk />", "", force=True)}
    set_drives(forced, cast("libvirt.virDomain", domain))
    live, force = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_DEVICE_MODIFY_FORCE
    assert domain.flags == [live | force]
