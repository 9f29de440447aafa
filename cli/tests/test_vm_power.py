"""start, restart, pause and unpause against scripted services on a real nats-server."""

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.schemas.api import WatchReply
from virtbus.schemas.disk import Tray
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.image_api import PulledImages
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import Devices, Disk, DiskBus, Domain, ImageVolume, VmSpec, Volume

pytestmark = pytest.mark.integration


async def test_restart_waits_for_the_guest_after_the_one_that_still_runs(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "restart", vm_view(power_observed=False))
    await script.see(
        WatchReply(items=(vm_view(power_observed=False),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.STOPPING, power_observed=False)),
        WatchReply(change=vm_view(state=VmState.PREPARING)),
        WatchReply(change=vm_view(revision=9)),
    )
    ended = await cli("vm", "restart", "web", "--grace", "3", "-o", "json")
    assert ended.code == 0, ended.err
    assert (ended.json["state"], ended.json["revision"]) == ("Running", 9)
    assert script.data("vm.restart") == [{"name": "web", "namespace": "default", "grace_s": 3}]


@pytest.mark.parametrize(("verb", "state"), [("pause", "Paused"), ("unpause", "Running")])
async def test_pause_and_unpause_wait_for_their_effect(
    script: Script, cli: Cli, verb: str, state: str
) -> None:
    before = VmState.PAUSED if verb == "unpause" else VmState.RUNNING
    script.answer("vm", verb, vm_view(state=before, power_observed=False))
    await script.see(
        WatchReply(items=(vm_view(state=before, power_observed=False),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState(state), paused=verb == "pause")),
    )
    ended = await cli("vm", verb, "web", "-o", "json")
    assert ended.code == 0, ended.err
    assert ended.json["state"] == state


async def test_a_paused_start_waits_for_the_paused_guest(script: Script, cli: Cli) -> None:
    script.answer("vm", "start", vm_view(state=VmState.STOPPED, paused=True))
    await script.see(
        WatchReply(items=(vm_view(state=VmState.STARTING, paused=True),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.PAUSED, paused=True)),
    )
    ended = await cli("vm", "start", "web", "--paused")
    assert ended.code == 0, ended.err
    assert script.data("vm.start")[0]["paused"] is True
    assert "Paused" in ended.out


@pytest.mark.parametrize(("state", "code"), [(VmState.PAUSED, 0), (VmState.FAILED, 1)])
async def test_a_wait_for_an_orphaned_vm_ends(
    script: Script, cli: Cli, state: VmState, code: int
) -> None:
    orphan = vm_view(state=state, annotations={"virtbus.io/orphaned": "no VMI"})
    script.answer("vm", "pause", orphan)
    await script.see(WatchReply(items=(orphan,)), WatchReply(synced=True))
    ended = await cli("vm", "pause", "web", "--timeout", "5")
    assert ended.code == code, ended.err


async def test_a_start_does_not_report_the_previous_starts_failure(
    script: Script, cli: Cli
) -> None:
    before = vm_view(state=VmState.FAILED, power_observed=False)
    script.answer("vm", "start", before)
    await script.see(
        WatchReply(items=(before,)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.PREPARING)),
        WatchReply(change=vm_view()),
    )
    ended = await cli("vm", "start", "web", "-o", "json")
    assert ended.code == 0, ended.err
    assert ended.json["state"] == "Running"


async def test_a_guest_that_fails_before_it_is_paused_ends_the_wait(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "pause", vm_view(power_observed=False))
    await script.see(
        WatchReply(items=(vm_view(power_observed=False),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.FAILED, power_observed=False)),
    )
    ended = await cli("vm", "pause", "web")
    assert ended.code == 1
    assert "web is Failed" in ended.err


async def test_a_guest_that_is_off_is_not_paused(script: Script, cli: Cli) -> None:
    refusal = VirtbusError(Code.CONFLICT, "not_running", "web is not running")
    script.answer("vm", "pause", refusal)
    ended = await cli("vm", "pause", "web")
    assert (ended.code, ended.err) == (1, "error: web is not running\n")


@pytest.mark.parametrize("verb", ["pause", "unpause", "restart", "start"])
async def test_each_verb_has_a_help_text(cli: Cli, verb: str) -> None:
    ended = await cli("vm", verb, "--help")
    assert ended.code == 0
    assert f"virtbus vm {verb} web" in ended.out


@pytest.mark.parametrize("verb", ["reset", "soft-reboot", "thaw"])
async def test_a_command_is_for_the_guest_that_was_seen(
    script: Script, cli: Cli, verb: str
) -> None:
    script.answer("vm", "get", vm_view(epoch=3))
    script.answer("vm", verb, vm_view(epoch=3))
    ended = await cli("vm", verb, "web", "-o", "json")
    assert ended.code == 0, ended.err
    assert ended.json["epoch"] == 3
    assert script.data(f"vm.{verb}") == [{"name": "web", "namespace": "default", "epoch": 3}]
    assert f"virtbus vm {verb} web" in (await cli("vm", verb, "--help")).out


async def test_a_freeze_has_a_time_limit_with_a_unit(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view(epoch=3))
    script.answer("vm", "freeze", vm_view(epoch=3))
    ended = await cli("vm", "freeze", "web", "--timeout", "2m")
    assert ended.code == 0, ended.err
    query = {"name": "web", "namespace": "default", "epoch": 3, "timeout_s": 120}
    assert script.data("vm.freeze") == [query]
    wrong = await cli("vm", "freeze", "web", "--timeout", "soon")
    assert wrong.code == 2
    assert "'soon' is no time; write 30s, 5m or 2h" in wrong.err


async def test_a_medium_is_ejected_by_an_update_of_the_spec(script: Script, cli: Cli) -> None:
    drives = (
        Disk(name="root"),
        Disk(name="cd", bus=DiskBus.SATA, device="cdrom"),
    )
    spec = VmSpec(domain=Domain(devices=Devices(disks=drives)))
    script.answer("vm", "get", vm_view(spec=spec))
    script.answer("vm", "update", vm_view(spec=spec))
    trays = []
    for words in ("eject web cd", "eject web cd --force", "insert web cd"):
        ended = await cli("vm", *words.split())
        assert ended.code == 0, ended.err
        data = script.data("vm.update")[-1]
        assert (data["uid"], data["revision"]) == (UID, 7)
        trays.append([disk["tray"] for disk in data["spec"]["domain"]["devices"]["disks"]])
    assert trays == [[None, "open"], [None, "forced-open"], [None, None]]
    wrong = await cli("vm", "eject", "web", "root")
    assert wrong.code == 2
    assert "its drives: cd" in wrong.err


async def test_another_medium_is_fetched_to_the_node_and_pinned(script: Script, cli: Cli) -> None:
    drive = Disk(name="cd", bus=DiskBus.SATA, device="cdrom", tray=Tray.OPEN)
    volume = Volume(name="cd", image=ImageVolume(ref="installer"))
    spec = VmSpec(domain=Domain(devices=Devices(disks=(drive,))), volumes=(volume,))
    digest = "sha256:" + "5e" * 32
    image = ImageInfo(digest=digest, format=ImageFormat.RAW, size_bytes=1, virtual_size_bytes=1)
    script.answer("vm", "get", vm_view(spec=spec))
    script.answer("vm", "update", vm_view(spec=spec))
    script.answer("image", "pull", PulledImages(images={"n1": image}))
    for ref in ("drivers", f"drivers@sha256:{'1' * 64}"):
        ended = await cli("vm", "insert", "web", "cd", ref)
        assert ended.code == 0, ended.err
        asked = script.data("image.pull")[-1]
        assert (asked["ref"], asked["node"], asked["namespace"]) == (ref, "n1", "default")
        sent = script.data("vm.update")[-1]["spec"]
        assert sent["volumes"][0]["image"]["ref"] == f"drivers@{digest}"
        assert sent["domain"]["devices"]["disks"][0]["tray"] is None
    script.answer("image", "pull", PulledImages(errors={"n1": "no such image"}))
    assert (await cli("vm", "insert", "web", "cd", "drivers")).code == 1
    assert len(script.data("vm.update")) == 2
