"""Security groups against a scripted controller."""

from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.security_group import Direction, GroupSpec
from virtbus.schemas.security_group_api import (
    SecurityGroupCreated,
    SecurityGroupPage,
    SecurityGroupView,
)

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {
    "selector": {"labels": {"app": "web"}},
    "rules": [
        {"direction": "ingress", "protocol": "tcp", "ports": ["80", "8000-8080"]},
        {
            "direction": "ingress",
            "protocol": "tcp",
            "ports": ["22"],
            "cidrs": ["10.0.0.0/8", "fd00::/8"],
            "groups": ["admins"],
        },
        {"direction": "egress", "protocol": "icmp"},
    ],
}
RULES = [
    *("--ingress", "tcp:80,8000-8080"),
    *("--ingress", "tcp:22@10.0.0.0/8,group:admins,fd00::/8"),
    *("--egress", "icmp"),
]


def view(**changes: Any) -> SecurityGroupView:
    known: dict[str, Any] = {
        "uid": UID,
        "namespace": "default",
        "name": "web",
        "spec": GroupSpec.model_validate(SPEC),
        "isolates": (Direction.INGRESS, Direction.EGRESS),
        "members": ("a", "b"),
        "member_count": 9,
        "generation": 1,
        "revision": 3,
        "created_ns": 1,
    }
    return SecurityGroupView(**(known | changes))


async def test_create_sends_the_rules_and_shows_them_again(script: Script, cli: Cli) -> None:
    answer = SecurityGroupCreated(group=view(message="no group has the name admins"), created=True)
    script.answer("security-group", "create", answer)
    ended = await cli("security-group", "create", "web", "--select", "app=web", *RULES)
    assert ended.code == 0, ended.err
    assert script.data("security-group.create")[0]["spec"] == SPEC
    header, row, *rules = ended.out.splitlines()
    assert header.split()[:3] == ["NAMESPACE", "NAME", "SELECTS"]
    assert row.split() == ["default", "web", "app=web", "9", "ingress,", "egress", "3"]
    assert [line.strip() for line in rules] == [
        "ingress tcp:80,8000-8080",
        "ingress tcp:22@10.0.0.0/8,fd00::/8,group:admins",
        "egress icmp",
        "members: a, b, …",
    ]
    assert "no group has the name admins" in ended.err


async def test_a_spec_comes_from_a_file_or_from_options(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    script.answer("security-group", "create", SecurityGroupCreated(group=view(), created=True))
    file = tmp_path / "web.yaml"
    file.write_text(
        "selector: {expressions: [{key: app, operator: Exists}]}\nisolates: [ingress]\n"
    )
    assert (await cli("security-group", "create", "web", "--file", file)).code == 0
    assert script.data("security-group.create")[0]["spec"]["isolates"] == ["ingress"]
    for wrong in (
        ("--file", file, "--all-vms"),
        ("--all-vms", "--select", "a=b"),
        ("--ingress", "tcp:80"),
        ("--all-vms", "--ingress", ":80"),
        ("--all-vms", "--ingress", "tcp:80@"),
    ):
        assert (await cli("security-group", "create", "web", *wrong)).code == 2, wrong


def sent_rules(sent: dict[str, Any]) -> Any:
    """Return the rules of a request, without fields that are empty."""
    rules = GroupSpec.model_validate(sent["spec"]).rules
    return [rule.model_dump(mode="json", exclude_defaults=True) for rule in rules]


async def test_update_replaces_the_rules_of_the_given_directions(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    script.answer("security-group", "get", view())
    script.answer("security-group", "update", view())
    file = tmp_path / "web.yaml"
    file.write_text("selector: {}\nrules: [{direction: egress, protocol: udp}]\n")
    for words, directions in (
        (("--egress", "udp"), ["egress", "ingress", "ingress"]),
        (("--egress", "udp", "--ingress", "udp"), ["ingress", "egress"]),
        (("--file", file), ["egress"]),
    ):
        ended = await cli("security-group", "update", "web", *words)
        assert ended.code == 0, ended.err
        sent = script.data("security-group.update")[-1]
        assert [rule["direction"] for rule in sent_rules(sent)] == directions


async def test_an_update_by_a_file_replaces_the_whole_spec(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    old = GroupSpec.model_validate({**SPEC, "isolates": ["ingress"]})
    script.answer("security-group", "get", view(spec=old))
    script.answer("security-group", "update", view())
    file = tmp_path / "web.yaml"
    file.write_text("selector: {labels: {app: db}}\n")
    assert (await cli("security-group", "update", "web", "--file", file)).code == 0
    (sent,) = script.data("security-group.update")
    assert sent["spec"] == {"selector": {"labels": {"app": "db"}}}


async def test_no_rules_and_rules_exclude_each_other(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text("rules: []\n")
    for words in (("--ingress", "tcp:80"), ("--egress", "icmp"), ("--file", file)):
        ended = await cli("security-group", "update", "web", "--no-rules", *words)
        assert ended.code == 2, ended.err
        assert "--no-rules removes all rules" in ended.err
    assert not script.asked


async def test_update_replaces_what_is_given_at_the_revision_that_was_read(
    script: Script, cli: Cli
) -> None:
    script.answer("security-group", "get", view())
    script.answer("security-group", "update", view())
    ended = await cli("security-group", "update", "web", "--ingress", "udp:53", "--label", "a=b")
    assert ended.code == 0, ended.err
    (sent,) = script.data("security-group.update")
    rule = {"direction": "ingress", "protocol": "udp", "ports": ["53"]}
    assert sent_rules(sent) == [rule, {"direction": "egress", "protocol": "icmp"}]
    assert sent["spec"]["selector"] == {**SPEC["selector"], "expressions": []}
    assert (sent["revision"], sent["labels"]) == (3, {"a": "b"})
    assert (await cli("security-group", "update", "web")).code == 2
    assert (await cli("security-group", "update", "web", "--no-rules")).code == 0
    assert not script.data("security-group.update")[1]["spec"].get("rules")


async def test_list_and_delete(script: Script, cli: Cli) -> None:
    script.answer("security-group", "list", SecurityGroupPage(items=(view(),)))
    script.answer("security-group", "delete", view())
    gone = VirtbusError(Code.NOT_FOUND, "security_group_not_found", "gone")
    script.answer("security-group", "get", gone)
    assert (await cli("security-group", "list")).out.splitlines()[1].split()[1] == "web"
    ended = await cli("security-group", "delete", "web")
    assert (ended.code, ended.out.strip()) == (0, "web deleted")
