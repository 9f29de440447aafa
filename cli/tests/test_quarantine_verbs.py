"""`virtbus node quarantine` and `vm adopt`: their requests and their output."""

from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.schemas.api import VmPage
from virtbus.schemas.quarantine import NodeQuarantined, QuarantineEntry

HELD = QuarantineEntry(
    entry=UID, uid=UID, namespace="default", name="web", held=True, why="running; no record"
)
KEPT = QuarantineEntry(
    entry=f"{UID}.2", uid=UID, bytes=3 << 30, why="moved", since_ns=1_795_000_000 * 10**9
)


async def test_held_and_kept_entries_are_listed(script: Script, cli: Cli) -> None:
    answer = NodeQuarantined(node="n1", entries=(HELD, KEPT), total=3)
    script.answer("node", "quarantine", answer)
    done = await cli("node", "quarantine", "list", "n1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[1].split()[:3] == [UID, "default/web", "held"]
    assert lines[2].split()[:3] == [f"{UID}.2", "-", "kept"]
    assert "3GiB" in lines[2]
    assert "and 1 more" in done.out
    assert script.data("node.quarantine") == [{"node": "n1"}]


async def test_an_empty_quarantine_is_reported(script: Script, cli: Cli) -> None:
    script.answer("node", "quarantine", NodeQuarantined(node="n1"))
    done = await cli("node", "quarantine", "list", "n1")
    assert "nothing is held or kept on n1" in done.err


async def test_an_entry_is_adopted_under_another_name(script: Script, cli: Cli) -> None:
    script.answer("node", "quarantine", NodeQuarantined(node="n1", adopted=UID))
    done = await cli("node", "quarantine", "adopt", "n1", f"{UID}.2", "--name", "rescued")
    assert f"is VM {UID} now" in done.out
    assert script.data("node.quarantine") == [
        {"node": "n1", "do": "adopt", "entry": f"{UID}.2", "name": "rescued"}
    ]


async def test_keep_and_purge_name_their_entry(script: Script, cli: Cli) -> None:
    script.answer("node", "quarantine", NodeQuarantined(node="n1"))
    for word in ("keep", "purge"):
        assert (await cli("node", "quarantine", word, "n1", UID)).code == 0
        assert (await cli("node", "quarantine", word, "n1")).code == 2
    assert [one["do"] for one in script.data("node.quarantine")] == ["keep", "purge"]


async def test_an_orphaned_vm_is_listed_as_such_and_is_taken_from_its_cluster(
    script: Script, cli: Cli
) -> None:
    labels = {"virtbus.io/cluster": "c1", "kubevirt.io/created-by": UID, "app": "web"}
    notes = {"virtbus.io/orphaned": "its cluster has no VMI of it", "team": "a"}
    orphan = vm_view(labels=labels, annotations=notes, revision=7)
    script.answer("vm", "list", VmPage(items=(orphan,)))
    assert ",orphaned" in (await cli("vm", "list")).out
    script.answer("vm", "get", orphan)
    script.answer("vm", "update", orphan)
    assert (await cli("vm", "adopt", UID)).code == 0
    (update,) = script.data("vm.update")
    assert (update["revision"], update["labels"]) == (7, {"app": "web"})
    assert update["annotations"] == {"team": "a"}


async def test_a_vm_that_no_cluster_made_is_not_adopted(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())
    done = await cli("vm", "adopt", "web")
    assert done.code == 1
    assert "not made by a Kubernetes cluster" in done.err
