"""Groups that only hosts have: a person decides which of them a rebuilt bus gets."""

from collections.abc import Mapping
from typing import Any

import pytest

from virtbus.controller.core.group_rebuild import GroupAction, Known, lost_groups, rebuilt
from virtbus.controller.core.vm_keys import StoredGroup
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


def test_no_copy_of_a_host_is_believed_without_a_person() -> None:
    steps = lost_groups({"n2": [group(81)], "n1": [group()], "n3": [group()]}, LOST, ())
    assert [(one.step, one.nodes) for one in steps] == [
        (GroupAction.UNCONFIRMED, ("n1", "n3")),
        (GroupAction.UNCONFIRMED, ("n2",)),
    ]
    assert "--accept-group n2/default/web" in steps[1].why
    assert not steps[0].group.peers


@pytest.mark.parametrize("accepted", ["n1", "n1/default/web"])
def test_the_accepted_copy_is_written(accepted: str) -> None:
    hosts = {"n1": [group()], "n2": [group(81, generation=2**40)]}
    (step,) = lost_groups(hosts, LOST, [accepted])
    assert (step.step, step.nodes, step.group.generation) == (GroupAction.ADD, ("n1",), 1)
    assert lost_groups(hosts, LOST, ["n1/default/db"])[0].step is GroupAction.UNCONFIRMED


def test_the_newest_of_accepted_copies_is_written_and_equal_generations_must_agree() -> None:
    hosts = {"n1": [group()], "n2": [group(81, generation=2)]}
    (step,) = lost_groups(hosts, LOST, ["n1", "n2"])
    assert step.nodes == ("n2",)
    hosts = {"n1": [group()], "n2": [group(81)]}
    assert {one.step for one in lost_groups(hosts, LOST, ["n1", "n2"])} == {GroupAction.CONFLICT}


def test_groups_that_the_bus_has_or_ended_and_those_of_bridges_are_not_listed() -> None:
    hosts = {"n1": [group()]}
    assert lost_groups(hosts, on_bus(1), ["n1"]) == []
    assert lost_groups(hosts, on_bus(1, UID.replace("f1", "f2")), ["n1"]) == []
    assert lost_groups(hosts, {}, ["n1"]) == []  # it was deleted on this bus
    assert lost_groups({"n1": [group(owner="bridge-a")]}, LOST, ["n1"]) == []


def test_a_newer_copy_replaces_that_of_a_backup_and_keeps_its_labels() -> None:
    bus = on_bus(1)
    (step,) = lost_groups({"n1": [group(81, generation=2)]}, bus, ["n1"])
    record = rebuilt(step.group, bus[WEB], 1)
    assert (step.step, record.generation, record.labels) == (GroupAction.RAISE, 2, {"tier": "x"})
    assert record.spec.rules[0].ports == ("81",)
