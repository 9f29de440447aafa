"""Verbs of CNI beyond ADD and DEL: STATUS, CHECK, GC, and the cache of results."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from services.netd.tests.pretended_host import Node
from services.netd.tests.test_cni import A, B, bridge, commands, plugin, without_bridge
from services.netd.tests.test_network_objects import NET, target

from virtbus.netd.core.cni_verbs import CniPlace, CniVerb, chosen_version, has_verb
from virtbus.netd.core.libcni_cache import cached_result
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.cni_cache import CniCache
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.path_check import PathCheck
from virtbus.netd.plugin_sweep import PluginSweep
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.network_path import NetworkAsk
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration


def of_1_1(node: Node, name: str, *plugins: dict[str, Any], **more: Any) -> None:
    conf = {"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0", "9.0.0"], "name": name}
    text = json.dumps({**conf, "plugins": plugins, **more})
    (node.conf_dir / f"{name}.conflist").write_text(text)


RECORDING = """
cat > "{log}.$CNI_COMMAND"
case "$CNI_COMMAND" in
ADD) sed 's/.*"prevResult": //; s/}}$//' "{log}.ADD";;
{verb}) echo '{{"cniVersion": "1.1.0", "code": 50, "msg": "no route to its server"}}'; exit 1;;
esac
"""


def recording(node: Node, *, failing: str = "none") -> None:
    """A plugin of spec 1.1 that stores its last input for each verb, and fails on one of them."""
    log = node.host.tmp / "cni-bin" / "newest"
    plugin(node, "newest", RECORDING.format(log=log, verb=failing))


def last_input(node: Node, verb: str) -> dict[str, Any]:
    path = node.host.tmp / "cni-bin" / f"newest.{verb}"
    given: dict[str, Any] = json.loads(path.read_text())
    return given


def older(node: Node, **more: Any) -> dict[str, Any]:
    """Debian's bridge plugin, which speaks 1.0, in a chain of 1.1."""
    script = 'case "$CNI_COMMAND" in STATUS|GC) exit 0;; esac\n'
    script += "sed 's/1\\.1\\.0/1.0.0/g' | /usr/lib/cni/bridge"
    plugin(node, "bridge10", script)
    return bridge(node, **more) | {"type": "bridge10"}


async def test_a_plugin_that_is_not_ready_makes_nothing_and_is_asked_again(node: Node) -> None:
    recording(node, failing="STATUS")
    of_1_1(node, "lan", older(node), {"type": "newest"})
    try:
        with pytest.raises(VirtbusError, match="newest is not ready: no route") as refused:
            await node.attach(A, networks=("lan",))
        assert (refused.value.reason, refused.value.body.retry) == ("cni_not_ready", Retry.LATER)
        assert "ADD" not in commands(node, "bridge10")
        assert last_input(node, "STATUS") == {
            "type": "newest",
            "name": "lan",
            "cniVersion": "1.1.0",
        }
        recording(node)
        assert (await node.attach(A, networks=("lan",))).phase is NetPhase.READY
        await node.attachments.release(A, 1)
    finally:
        without_bridge()


async def test_the_result_is_stored_as_libcni_stores_it(node: Node) -> None:
    recording(node)
    of_1_1(node, "lan", older(node, capabilities={"ips": True}), {"type": "newest"})
    folder = node.state_dir / "netd" / "cni" / "results"
    try:
        asked = {"nics": ({"addresses": ["10.88.0.77"]},)}
        ready = await node.attach(A, networks=("lan",), **asked)
        (file,) = folder.iterdir()
        assert file.name == f"lan-{A}-eth0"
        text = file.read_text()
        stored = json.loads(text)
        assert list(stored) == [
            *("kind", "containerId", "config", "ifName", "networkName", "netns"),
            *("cniArgs", "capabilityArgs", "result"),
        ]
        assert (stored["kind"], stored["containerId"]) == ("cniCacheV1", A)
        assert base64.b64decode(stored["config"]) == (node.conf_dir / "lan.conflist").read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600
        mac = ready.interfaces[0].mac
        assert stored["capabilityArgs"] == {"ips": ["10.88.0.77/24"], "mac": mac}
        assert stored["result"]["ips"][0]["address"] == "10.88.0.77/24"
        assert text == json.dumps(stored, separators=(",", ":"))
        await node.attachments.release(A, 1)
        assert list(folder.iterdir()) == []
    finally:
        without_bridge()


ARGUMENTS = {"IgnoreUnknown": "1", "MAC": "02:11:50:16:b9:33"}
RUNTIME: dict[str, Any] = {
    "mac": "02:11:50:16:b9:33",
    "ips": ["10.88.0.77/24"],
    "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}],
    "dns": {"servers": ["192.0.2.53"]},
    "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 131_072},
}


@pytest.mark.parametrize(
    ("file", "result"),
    [("lan.conflist", "last"), ("old.conf", "old"), ("bare.conf", "bare")],
)
def test_the_stored_bytes_are_those_of_libcni(tmp_path: Path, file: str, result: str) -> None:
    """libcni 1.3.0 has written the files `.cached`, from these configurations and results."""
    recorded = Path(__file__).parent / "libcni"
    (tmp_path / file).write_bytes((recorded / file).read_bytes())
    name = file.partition(".")[0]
    state = Cni(tmp_path, (), CniCache(tmp_path), openings={"*": ("*",)}).load(name, "default")
    told = {"cniVersion": state.conflist["cniVersion"]}
    told |= json.loads((recorded / f"{result}.result").read_text())
    place = CniPlace(name, A, "eth0")
    given = ARGUMENTS, RUNTIME
    stored = cached_result(place, f"/run/netns/vb-{A}", state.source, given, told)
    assert stored == (recorded / f"{name}.cached").read_bytes()


def test_a_result_with_garbage_is_stored_too() -> None:
    place = CniPlace("lan", A, "eth0")
    for told in ({"cniVersion": 5, "ips": 7}, {"cniVersion": "1.0.0", "ips": 7, "dns": "x"}):
        stored = json.loads(cached_result(place, "/run/netns/x", "{}", (ARGUMENTS, RUNTIME), told))
        assert stored["result"]["cniVersion"] == told["cniVersion"]


async def test_the_check_of_a_vm_shows_what_a_chained_plugin_misses(node: Node) -> None:
    recording(node)
    of_1_1(node, "lan", older(node), {"type": "newest"})
    checks = PathCheck(node.doors, node.attachments, OrphanAudit(node.doors, node.attachments))
    try:
        await node.attach(A, networks=("lan",))
        for failing, what in (("none", ()), ("CHECK", ("newest misses a part",))):
            recording(node, failing=failing)
            view = await checks.view(NetworkAsk(uid=A, check=True))
            assert view.faults is not None
            found = [one.what for one in view.faults if "CNI" in one.what]
            assert len(found) == len(what)
            assert all(text in one for text, one in zip(what, found, strict=True))
        assert "prevResult" in last_input(node, "CHECK")
        assert "CHECK" not in commands(node, "bridge10")  # the guest has the address
        await node.attachments.release(A, 1)
    finally:
        without_bridge()


@pytest.mark.parametrize("disabled", [False, True])
async def test_plugins_of_an_object_remove_what_no_attachment_has(
    node: Node, disabled: bool
) -> None:
    recording(node)
    plugins = [older(node), {"type": "newest"}]
    node.doors.cni.allowed |= {"bridge10", "host-local", "newest"}
    config = {"cniVersion": "1.1.0", "plugins": plugins, "disableGC": disabled}
    made = target("cni", NET, "blue", config=json.dumps(config))
    sweep = PluginSweep(node.doors.cni, node.attachments)
    stale = node.state_dir / "netd" / "cni" / "results" / "lan-gone-eth0"
    try:
        await node.attach(A, **made)
        of_1_1(node, "lan", older(node), {"type": "newest"})
        await node.attach(B, networks=("lan",))
        stale.write_text("{}")
        await sweep.once()
        assert not stale.exists()
        assert commands(node, "newest").count("GC") == (0 if disabled else 1)
        if not disabled:  # the conflist of the node may have other users
            given = last_input(node, "GC")
            assert given["name"] == f"virtbus-{NET}"
            valid = [{"containerID": A, "ifname": "eth0"}]
            assert given["cni.dev/valid-attachments"] == valid
        for uid in (A, B):
            await node.attachments.release(uid, 1)
    finally:
        without_bridge()


def test_the_highest_version_that_both_know_is_chosen() -> None:
    for version, more, chosen in (
        ("0.4.0", ["1.0.0", "1.1.0", "1.2.0"], "1.1.0"),
        ("1.0.0", ["0.3.1"], "1.0.0"),
        ("1.2.0", [], "1.2.0"),
    ):
        assert chosen_version({"cniVersion": version, "cniVersions": more}) == chosen


def test_only_true_switches_a_verb_off() -> None:
    for value, there in ((True, False), ("true", False), ([], True), ({}, True), (None, True)):
        conflist: dict[str, Any] = {"cniVersion": "1.1.0", "disableGC": value}
        assert has_verb(conflist, CniVerb.GC) is there


async def test_a_collection_spares_what_was_attached_while_it_waited(tmp_path: Path) -> None:
    cni = Cni(tmp_path, (), CniCache(tmp_path))
    cni._run = asked = AsyncMock()  # type: ignore[method-assign]
    conflist = {"cniVersion": "1.1.0", "name": "blue", "plugins": [{"type": "newest"}]}
    known: list[CniPlace] = []
    async with asyncio.timeout(5), asyncio.TaskGroup() as group, cni._collecting:
        group.create_task(cni.collect(conflist, lambda: known))
        await asyncio.sleep(0)
        known += [CniPlace("blue", A, "eth0"), CniPlace("red", B, "eth0")]
    given = json.loads(asked.await_args_list[0].args[2])
    assert given["cni.dev/valid-attachments"] == [{"containerID": A, "ifname": "eth0"}]


def test_a_broken_file_of_another_network_hides_no_unknown_one(tmp_path: Path) -> None:
    cni = Cni(tmp_path, (), CniCache(tmp_path))
    (tmp_path / "10-wlan.conflist").write_text("{")
    with pytest.raises(VirtbusError, match="no network 'lan' on this node"):
        cni.load("lan", "default")
    for name in ("10-my-lan.conf", "lan.conflist"):
        (tmp_path / name).write_text("{")
        with pytest.raises(VirtbusError, match=f"{name}: it is not JSON"):
            cni.load("lan", "default")
        (tmp_path / name).unlink()
