"""Groups that only hosts have: a person decides which of them a rebuilt bus gets."""

from collections.abc import Mapping
from typing import Any

import pytest

from virtbus.controller.core.group_rebuild import (
    Accepted,
    GroupAction,
    Known,
    accepted_copies,
    digest_of,
    lost_groups,
    rebuilt,
)
from virtbus.controller.core.vm_keys import StoredGroup
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.wire import validate

UID = "0192f0c1-2d3e-7abc-8def-0000000000f1"
WEB = ("default", "web")
LOST: Mapping[tuple[str, str], Known] = {WEB: None}


def group(port: int = 80, **more: Any) -> NodeGroup:
    rule = {"direction": "ingress", "protocol": "tcp", "ports": [str(port)], "groups": ["lb"]}
    spec = {"selector": {"labels": {"app": "web"}}, "rules": [rule]}
    about = {"uid": UID, "namespace": "default", "name": "web", "spec": spec}
    return validate(NodeGroup, about | {"peers": {"lb": {"default": ["10.0.0.9"]}}} | more)


def on_bus(generation: int, uid: str = UID) -> Mapping[tuple[str, str], Known]:
    record = rebuilt(group(uid=uid, generation=generation), None, 1)
    return {WEB: StoredGroup(record.model_copy(update={"labels": {"tier": "x"}}), 7)}


def accept(**copies: NodeGroup) -> Accepted:
    """The copies that a person has seen, by node."""
    return accepted_copies(
        f"{node}/{one.namespace}/{one.name}@{digest_of(one)}" for node, one in copies.items()
    )


def test_no_copy_of_a_host_is_believed_without_a_person() -> None:
    steps = lost_groups({"n2": [group(81)], "n1": [group()], "n3": [group()]}, LOST, {})
    assert [(one.step, one.nodes) for one in steps] == [
        (GroupAction.UNCONFIRMED, ("n1", "n3")),
        (GroupAction.UNCONFIRMED, ("n2",)),
    ]
    assert f"--accept-group n2/default/web@{digest_of(group(81))}" in steps[1].why
    assert not steps[0].group.peers


@pytest.mark.parametrize("word", ["n1", "n1/default/web"])
def test_a_copy_is_accepted_only_with_its_digest(word: str) -> None:
    with pytest.raises(VirtbusError, match="must be NODE/NAMESPACE/NAME@DIGEST"):
        accepted_copies([word])


def test_the_accepted_copy_is_written() -> None:
    hosts = {"n1": [group()], "n2": [group(81, generation=2**40)]}
    (step,) = lost_groups(hosts, LOST, accept(n1=group()))
    assert (step.step, step.nodes, step.group.generation) == (GroupAction.ADD, ("n1",), 1)
    other = accept(n1=group(name="db"))
    assert lost_groups(hosts, LOST, other)[0].step is GroupAction.UNCONFIRMED


@pytest.mark.parametrize(
    "changed",
    [
        group(81),
        group(generation=2),
        group(uid=UID.replace("f1", "f2")),
        group(spec={"selector": {}, "rules": []}),
        group(spec=group().spec.model_dump() | {"isolates": []}),
    ],
)
def test_a_copy_that_has_changed_since_a_person_saw_it_is_a_conflict(changed: NodeGroup) -> None:
    seen = accept(n1=group())
    (step,) = lost_groups({"n1": [changed]}, LOST, seen)
    assert step.step is GroupAction.CONFLICT
    assert "not the accepted copy; if its rules are right: --accept-group n1/" in step.why
    assert digest_of(changed) in step.why
    steps = lost_groups({"n1": [changed], "n2": [group()]}, LOST, {**seen, **accept(n2=group())})
    assert [(one.step, one.nodes) for one in steps] == [
        (GroupAction.CONFLICT, ("n1",)),
        (GroupAction.ADD, ("n2",)),
    ]


def test_a_digest_ignores_peers_and_the_order_of_labels() -> None:
    labels = {"app": "web", "tier": "x"}
    one = group(spec={"selector": {"labels": labels}}, peers={})
    other = group(spec={"selector": {"labels": dict(reversed(labels.items()))}})
    assert digest_of(one) == digest_of(other)


def test_the_newest_of_accepted_copies_is_written_and_equal_generations_must_agree() -> None:
    newer = group(81, generation=2)
    hosts = {"n1": [group()], "n2": [newer]}
    (step,) = lost_groups(hosts, LOST, accept(n1=group(), n2=newer))
    assert step.nodes == ("n2",)
    hosts = {"n1": [group()], "n2": [group(81)]}
    steps = lost_groups(hosts, LOST, accept(n1=group(), n2=group(81)))
    assert {one.step for one in steps} == {GroupAction.CONFLICT}


def test_groups_that_the_bus_has_or_ended_and_those_of_bridges_are_not_listed() -> None:
    hosts, seen = {"n1": [group()]}, accept(n1=group())
    assert lost_groups(hosts, on_bus(1), seen) == []
    assert lost_groups(hosts, on_bus(1, UID.replace("f1", "f2")), seen) == []
    assert lost_groups(hosts, {}, seen) == []  # it was deleted on this bus
    of_bridge = group(owner="bridge-a")
    assert lost_groups({"n1": [of_bridge]}, LOST, accept(n1=of_bridge)) == []


def test_a_newer_copy_replaces_that_of_a_backup_and_keeps_its_labels() -> None:
    bus, newer = on_bus(1), group(81, generation=2)
    (step,) = lost_groups({"n1": [newer]}, bus, accept(n1=newer))
    record = rebuilt(step.group, bus[WEB], 1)
    assert (step.step, record.generation, record.labels) == (GroupAction.RAISE, 2, {"tier": "x"})
    assert record.spec.rules[0].ports == ("81",)
