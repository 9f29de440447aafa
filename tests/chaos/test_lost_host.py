"""Losses of a host or its bus: a reboot (F23), and a bus that is recreated (F18)."""

import json
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import BRIDGE, HALT, Json, Platform, address, until

from virtbus.bus.runtime.ids import uuid7

pytestmark = pytest.mark.e2e


def create(platform: Platform, name: str, strategy: str, image: str = "tiny") -> Json:
    """Create a VM with a run strategy and wait until it runs."""
    spec = {"name": name, "image": image, "memory": "128MiB", "spec": {"run_strategy": strategy}}
    path = platform.base / f"{name}.json"
    path.write_text(json.dumps(spec))
    return platform.create(name, "-f", str(path))


def kill_guests(views: list[Json]) -> None:
    """Kill the emulators, as a power cut does."""
    for view in views:
        for pid in host.qemu_pids(view["uid"]):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(host.qemu_pids(view["uid"]) for view in views), "no emulator")


def reboot(platform: Platform, views: list[Json]) -> None:
    """End every process, and remove namespaces, links and /run; disks stay."""
    resolvers = host.resolvers(platform.run_dir)
    pids = [*host.children(platform.up.pid), platform.up.pid, *resolvers]
    os.kill(platform.up.pid, signal.SIGSTOP)  # so that it starts nothing again
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    platform.up.wait(10)
    until(lambda: not host.resolvers(platform.run_dir), "no resolver")
    kill_guests(views)
    for view in views:
        host.run("ip", "netns", "delete", f"vb-{view['uid']}")
    host.run("ip", "link", "delete", BRIDGE)
    host.run("nft", "delete", "table", "inet", "virtbus", check=False)
    shutil.rmtree(platform.run_dir)


@pytest.mark.timeout(240)
def test_after_a_host_reboot_vms_come_back_by_run_strategy_with_their_addresses(
    patient: Platform,
) -> None:
    always = patient.create("always")
    rerun = create(patient, "rerun", "RerunOnFailure")
    once = create(patient, "once", "Once", HALT)
    stopped = patient.create("stopped", "--image", HALT)
    patient.cli("vm", "stop", "stopped", "--grace", "0")
    patient.wait_state("stopped", "Stopped")
    views = [always, rerun, once, stopped]
    addresses = {view["name"]: address(view) for view in patient.vms()}

    reboot(patient, views)
    patient.start()
    patient.wait_whole()

    assert patient.wait_state("once", "Failed")["state"] == "Failed"
    for name in ("always", "rerun"):
        uid = patient.get(name)["uid"]  # its status from before the cut may still say Running
        until(partial(host.qemu_pids, uid), f"{name} runs again")
        view = patient.wait_state(name, "Running")
        assert address(view) == addresses[name]
        assert len(host.qemu_pids(view["uid"])) == 1
    assert patient.get("stopped")["state"] == "Stopped"
    patient.wait_ready("always", "rerun")
    assert host.ping(addresses["always"])
    assert host.qemu_pids(once["uid"]) == host.qemu_pids(stopped["uid"]) == []


@pytest.mark.timeout(240)
def test_a_recreated_bus_is_rebuilt_from_the_host_and_no_guest_notices(patient: Platform) -> None:
    runs = patient.create("runs")
    patient.create("stopped", "--image", HALT)
    patient.cli("vm", "stop", "stopped", "--grace", "0")
    patient.wait_state("stopped", "Stopped")
    patient.wait_ready("runs")
    pids = host.qemu_pids(runs["uid"])

    patient.stop()
    shutil.rmtree(patient.state_dir / "nats")
    patient.start()

    until(lambda: _node(patient)["state"] == "recovering", "the node holds")
    assert "bus rebuild" in json.dumps(_node(patient))
    assert patient.vms() == []
    node = _node(patient)["node"]
    answer = json.loads(patient.cli("bus", "rebuild", "--dry-run", "-o", "json"))
    assert {vm["step"] for vm in answer["vms"]} == {"unsigned"}  # the key was lost with the bus
    believed = ("--accept-unsigned", node)
    answer = json.loads(patient.cli("bus", "rebuild", *believed, "-o", "json"))
    assert {vm["name"]: vm["step"] for vm in answer["vms"]} == {"runs": "add", "stopped": "add"}
    patient.wait_whole()
    assert patient.wait_state("runs", "Running")["uid"] == runs["uid"]
    assert patient.wait_state("stopped", "Stopped")["state"] == "Stopped"
    assert host.qemu_pids(runs["uid"]) == pids
    assert host.ping(address(patient.get("runs")))
    patient.create("other", "--image", HALT)
    patient.cli("vm", "start", "stopped")
    patient.wait_state("stopped", "Running")


@pytest.mark.timeout(240)
def test_a_restored_backup_and_a_rebuild_restore_the_hosts_latest_state(patient: Platform) -> None:
    kept = patient.create("kept", "--image", HALT)
    patient.create("gone", "--image", HALT)
    later = patient.create("later", "--image", HALT, wait="running")
    file = patient.base / "backup"
    patient.cli("bus", "backup", str(file), "--creds", str(patient.run_dir / "admin.creds"))
    patient.delete("gone")
    patient.cli("vm", "stop", "later", "--grace", "0")
    patient.wait_state("later", "Stopped")
    new = patient.create("new", "--image", HALT)
    pids = [host.qemu_pids(view["uid"]) for view in (kept, new)]

    patient.stop()
    shutil.rmtree(patient.state_dir / "nats")
    patient.start()
    patient.cli("bus", "restore", str(file), "--creds", str(patient.run_dir / "admin.creds"))
    until(lambda: _node(patient)["state"] == "recovering", "the node holds")
    answer = json.loads(patient.cli("bus", "rebuild", "-o", "json"))
    steps = {vm["name"]: vm["step"] for vm in answer["vms"]}
    assert steps == {"gone": "end", "later": "raise", "new": "add"}
    patient.wait_whole()
    states = {"kept": "Running", "later": "Stopped", "new": "Running"}
    until(
        lambda: {view["name"]: view["state"] for view in patient.vms()} == states,
        lambda: f"{states}, but {patient.vms()}",
    )
    assert [host.qemu_pids(view["uid"]) for view in (kept, new)] == pids
    assert host.qemu_pids(later["uid"]) == []


def test_an_audit_names_and_repairs_only_objects_without_a_record(
    patient: Platform, tmp_path: Path
) -> None:
    view = patient.create("there", "--image", HALT)
    assert patient.cli("node", "audit") == "all is well: nothing is left over\n"
    uid = uuid7()
    patient.uids.add(uid)
    folder = patient.state_dir / "disks" / uid
    folder.mkdir()
    (folder / "root.qcow2").write_bytes(b"")
    xml = tmp_path / "domain.xml"
    xml.write_text(
        f"<domain type='qemu'><name>vb-{uid}</name><uuid>{uid}</uuid><memory>1024</memory>"
        "<os><type arch='x86_64'>hvm</type></os><devices>"
        f"<disk type='file'><source file='{folder}/root.qcow2'/><target dev='vda'/></disk>"
        "</devices></domain>"
    )
    host.run("virsh", "-q", "-c", "qemu:///system", "define", str(xml))
    found = patient.try_cli("node", "audit", "-o", "json")
    assert found.returncode == 1
    (node,) = json.loads(found.stdout)["nodes"]
    assert sorted((one["kind"], one["uid"]) for one in node["findings"]) == [
        ("disk", uid),
        ("domain", uid),
    ]
    patient.cli("node", "audit", "--repair")
    assert patient.cli("node", "audit") == "all is well: nothing is left over\n"
    assert not folder.exists()
    name = _node(patient)["node"]
    kept = json.loads(patient.cli("node", "quarantine", "list", name, "-o", "json"))["entries"]
    assert [(one["entry"], one["held"]) for one in kept] == [(uid, False)]
    patient.cli("node", "quarantine", "purge", name, uid)
    assert len(host.qemu_pids(view["uid"])) == 1


def _node(platform: Platform) -> Json:
    (item,) = json.loads(platform.cli("node", "list", "-o", "json"))["items"] or [{"state": ""}]
    found: Json = item
    return found
