"""The VMs of a backup become requests for `vm.create`, with their secrets."""

import hashlib
import json

import pytest

from virtbus.bus.provisioning.backup import Backup, BackupError, lines, parse
from virtbus.bus.provisioning.specs import specs
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCreate
from virtbus.schemas.wire import encode, validate

A, B = (f"0192f0c1-2d3e-7abc-8def-00000000000{n}" for n in "ab")
SPEC = {
    "domain": {"cpu": {"cores": 2}, "memory": {"guest": "256MiB"}},
    "volumes": [
        {"name": "root", "image": {"ref": "https://example.org/i.qcow2?sha256:" + "0" * 64}},
        {"name": "seed", "cloud_init_no_cloud": {}},
        {"name": "answers", "sysprep": {}},
    ],
    "ignition": {},
}
ANSWERS = {"volume_label": "unattendCD", "data": {"unattend.xml": "<a/>"}}
IGNITION = {"config": '{"ignition": {"version": "3.4.0"}}'}
SECRETS = {
    "uid": A,
    "cloud_init": {"seed": {"user_data": "#cloud-config\n"}},
    "image_pull": {"root": "signature=1"},
    "files": {"answers": ANSWERS},
    "ignition": IGNITION,
}


def backup(**record: object) -> Backup:
    value = {"uid": A, "name": "web", "namespace": "default", "spec": SPEC, "node": "n1"}
    return Backup(
        1,
        {
            subjects.vm_record("n1", A): encode(value | record),
            subjects.vm_secret("n1", A): encode(SECRETS),
            subjects.vm_record("n1", B): encode(value | {"uid": B, "deleting": True}),
        },
        frozenset(),
    )


def test_a_vm_becomes_a_valid_request_with_its_secrets() -> None:
    (request,) = specs(backup(labels={"tier": "front"}))
    assert request["labels"] == {"tier": "front"}
    assert "uid" not in request
    root, seed, answers = request["spec"]["volumes"]
    assert root["image"]["ref"] == "https://example.org/i.qcow2?signature=1"
    assert seed["cloud_init_no_cloud"] == {"user_data": "#cloud-config\n"}
    assert answers["sysprep"] == ANSWERS
    assert request["spec"]["ignition"] == IGNITION
    validate(VmCreate, request)


def test_a_backup_of_the_first_version_serves_for_specs_but_is_not_restored() -> None:
    first, *rest = (json.loads(line) for line in lines(backup()))
    old = [json.dumps(first | {"virtbus_backup": 1}).encode() + b"\n"]
    old += [json.dumps(item).encode() + b"\n" for item in rest[:-1]]
    old.append(json.dumps({"sha256": hashlib.sha256(b"".join(old)).hexdigest()}).encode())
    with pytest.raises(BackupError, match=r"of virtbus 0\.1.*upgrade-from-0\.1"):
        parse(old)
    assert len(list(specs(parse(old, oldest=1)))) == 1
