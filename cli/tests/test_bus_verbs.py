"""`virtbus bus VERB` against scripted services."""

from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.bus.client.connection import connect
from virtbus.bus.client.ports import Request
from virtbus.bus.provisioning.stream_setup import ensure
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.schemas.api import BusRebuilt, NodeAudited, NodeFindings, RebuiltNode, RebuiltVm
from virtbus.schemas.audit import AuditFinding
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.group_rebuild import RebuiltGroup
from virtbus.schemas.security_group import GroupSpec
from virtbus.schemas.subjects import signing_key, vm_record, vm_secret
from virtbus.schemas.wire import encode, validate

pytestmark = pytest.mark.integration


def rebuilt(step: str = "add", *, joined: bool = True, why: str = "") -> BusRebuilt:
    vm: dict[str, Any] = {"uid": UID, "namespace": "default", "name": "web", "node": "n1"}
    return BusRebuilt(
        vms=(RebuiltVm(**vm, step=step, message=why),),
        nodes=(RebuiltNode(node="n1", vms=1, joined=joined, message="" if joined else "holds"),),
        kept=3,
    )


async def test_a_rebuild_shows_written_records_and_following_hosts(
    script: Script, cli: Cli
) -> None:
    script.answer("bus", "rebuild", rebuilt())
    done = await cli("bus", "rebuild")
    assert done.code == 0
    assert script.data("bus.rebuild") == [{"dry_run": False}]
    assert "web   default    n1    add   -" in done.out
    assert "n1    1    yes" in done.out
    assert "3 VM(s) were as they should be" in done.out


async def test_a_backup_is_for_its_owner_only_and_goes_back_into_an_empty_bus(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    admin = ("--creds", str(script.files.creds("admin")))
    key = vm_record("n1", UID)
    async with connect(BusSettings(creds=script.files.creds("admin")), name="test") as bus:
        await ensure(bus)
        await bus.put(key, encode({"uid": UID}))
        await bus.put(vm_secret("n1", UID), b"\x80")
        file = tmp_path / "kept"
        done = await cli("bus", "backup", str(file), *admin)
        assert done.code == 0, done.err
        assert "1 VM(s), 1 secret(s)" in done.out
        assert "secrets in the clear" in done.err
        assert file.stat().st_mode & 0o777 == 0o600
        assert not list(tmp_path.glob(".kept*"))

        await bus.put(key, encode({"uid": UID, "epoch": 2}))
        refused = await cli("bus", "restore", str(file), *admin)
        assert refused.code == 1
        assert "virtbus bus rebuild" in refused.err

        await bus.purge(key)
        done = await cli("bus", "restore", str(file), *admin, "-o", "json")
        assert (done.code, done.json["vms"], done.json["deleted"]) == (0, [], [UID])

        await bus.js_api("STREAM.PURGE.KV_vm")
        done = await cli("bus", "restore", str(file), *admin, "-o", "json")
        assert (done.code, done.json["vms"]) == (0, [UID])
        entry = await bus.get(key)
        assert entry is not None
        assert entry.value == encode({"uid": UID})
    assert (await cli("bus", "restore", str(file), "--creds", "/none")).code == 5


async def test_a_backup_with_signing_keys_only_is_secret(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    admin = ("--creds", str(script.files.creds("admin")))
    async with connect(BusSettings(creds=script.files.creds("admin")), name="test") as bus:
        await ensure(bus)
        await bus.put(signing_key("k1"), b"seed")
    done = await cli("bus", "backup", str(tmp_path / "kept"), *admin)
    assert "0 VM(s), 0 secret(s)" in done.out
    assert "secrets in the clear" in done.err
    done = await cli("bus", "backup", "--without-secrets", str(tmp_path / "bare"), *admin)
    assert (done.code, done.err) == (0, "")


async def test_a_dry_run_only_requests_a_dry_run(script: Script, cli: Cli) -> None:
    script.answer("bus", "rebuild", rebuilt(joined=False))
    done = await cli("bus", "rebuild", "--dry-run", "-o", "json")
    assert (done.code, script.data("bus.rebuild")) == (0, [{"dry_run": True}])
    assert done.json["vms"][0]["step"] == "add"


async def test_a_rebuild_with_open_conflicts_is_refused_with_the_next_step(
    script: Script, cli: Cli
) -> None:
    script.answer("bus", "rebuild", rebuilt("conflict", joined=False, why="the name is taken"))
    done = await cli("bus", "rebuild")
    assert done.code == 1
    assert "the name is taken" in done.out
    assert "1 VM(s) in conflict; not following: n1" in done.err
    assert "virtbus bus rebuild" in done.err


async def test_groups_that_only_hosts_have_are_shown_with_their_rules(
    script: Script, cli: Cli
) -> None:
    rule = {"direction": "ingress", "protocol": "tcp", "ports": ["80"]}
    selector = {"labels": {"app": "web"}}
    spec = validate(GroupSpec, {"selector": selector, "rules": [rule], "isolates": []})
    about = {"namespace": "default", "name": "web", "nodes": ("n1", "n2"), "spec": spec}
    group = RebuiltGroup(**about, step="unconfirmed", message="nobody has accepted it")
    found = {"groups": (group,), "groups_message": "netd did not list all groups of n3"}
    script.answer("bus", "rebuild", rebuilt().model_copy(update=found))
    copy = f"n1/default/db@{'0a' * 16}"
    done = await cli("bus", "rebuild", "--accept-group", copy)
    assert done.code == 0
    assert script.data("bus.rebuild") == [{"dry_run": False, "accept_groups": [copy]}]
    rules = "ingress tcp:80; isolates nothing"
    assert f"n1,n2  unconfirmed  app=web  {rules}  nobody has accepted it" in done.out
    assert "1 security group(s) are only on hosts" in done.err
    assert "may be missing: netd did not list all groups of n3" in done.err


def audited(*, repaired: bool = False) -> NodeAudited:
    finding = AuditFinding(kind="domain", uid=UID, what="a domain, running", repair="end the guest")
    found = finding.model_copy(update={"repaired": repaired})
    return NodeAudited(nodes=(NodeFindings(node="n1", findings=(found,)),))


async def test_an_audit_without_findings_reports_success(script: Script, cli: Cli) -> None:
    script.answer("node", "audit", NodeAudited(nodes=(NodeFindings(node="n1"),)))
    done = await cli("node", "audit")
    assert (done.code, done.out) == (0, "all is well: nothing is left over\n")
    assert script.data("node.audit") == [{"repair": False}]


async def test_findings_are_shown_with_the_effect_of_repair(script: Script, cli: Cli) -> None:
    script.answer("node", "audit", audited())
    done = await cli("node", "audit", "n1")
    assert done.code == 1
    assert f"n1    domain  {UID}  a domain, running  end the guest" in done.out
    assert "1 finding(s) remain" in done.err


def orphans(*names: str, uid: str = UID) -> NodeAudited:
    found = [
        AuditFinding(kind=kind, uid=uid, namespace="shop", name=name, what="data")
        for kind, name in (one.split("/") for one in names)
    ]
    return NodeAudited(nodes=(NodeFindings(node="n1", findings=tuple(found)),))


async def test_all_data_without_a_record_is_adopted(script: Script, cli: Cli) -> None:
    torn = NodeFindings(node="n2", findings=(AuditFinding(kind="volume", uid=UID, what="torn"),))
    first = NodeAudited(nodes=(*orphans("volume/data").nodes, torn))
    answers = iter([first, orphans("snapshot/before", uid=UID[::-1]), orphans()])

    async def audit(_: Request) -> NodeAudited:
        return next(answers)

    script.handlers["node", "audit"] = audit
    for kind in ("volume", "snapshot"):
        script.answer(kind, "adopt", {})
    done = await cli("node", "audit", "--adopt")
    assert (done.code, done.out) == (0, "all is well: nothing is left over\n"), done.err
    whose = {"namespace": "shop", "node": "n1"}
    assert script.data("volume.adopt") == [{"name": "data", "uid": UID, **whose}]
    assert script.data("snapshot.adopt") == [{"name": "before", "uid": UID[::-1], **whose}]


async def test_data_that_cannot_be_adopted_is_named_and_tried_once(
    script: Script, cli: Cli
) -> None:
    script.answer("node", "audit", orphans("volume/data"))
    refusal = VirtbusError(Code.CONFLICT, "name_taken", "another volume has that name")
    script.answer("volume", "adopt", refusal)
    done = await cli("node", "audit", "n1", "--adopt")
    assert done.code == 1
    assert "volume shop/data of n1 is not adopted: another volume has that name" in done.err
    assert len(script.data("volume.adopt")) == 1


async def test_repaired_findings_are_no_refusal(script: Script, cli: Cli) -> None:
    script.answer("node", "audit", audited(repaired=True))
    done = await cli("node", "audit", "n1", "--repair", "-o", "json")
    assert done.code == 0
    assert done.json["nodes"][0]["findings"][0]["repaired"] is True
    assert script.data("node.audit") == [{"repair": True, "node": "n1"}]
