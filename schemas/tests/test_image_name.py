"""An image name counts only under its own key, and its spec holds nothing secret."""

from typing import Any

import pytest
from pydantic import ValidationError

from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageTarget, parse_image_ref
from virtbus.schemas.image_name import FLEET, ImageNameRecord, ImageNameSpec
from virtbus.schemas.image_name_api import ImageNameSet
from virtbus.schemas.records import read_image_name
from virtbus.schemas.wire import encode, validate

URL = "https://images.example/a.qcow2"
DIGEST = "sha256:" + "5e" * 32
RECORD = ImageNameRecord(
    uid="0192f0c1-2d3e-7abc-8def-0123456789ab",
    namespace="default",
    name="debian/12",
    spec=ImageNameSpec(url=URL),
    created_ns=1,
    changed_ns=1,
)


def test_a_name_at_its_own_key_is_read() -> None:
    assert read_image_name(subjects.image_name("default", "debian/12"), encode(RECORD)) == RECORD
    fleet = RECORD.model_copy(update={"namespace": FLEET})
    assert read_image_name(subjects.image_name("_", "debian/12"), encode(fleet)) == fleet


@pytest.mark.parametrize(("namespace", "name"), [("default", "debian/13"), ("_", "debian/12")])
def test_a_name_at_another_key_is_refused(namespace: str, name: str) -> None:
    with pytest.raises(VirtbusError) as refused:
        read_image_name(subjects.image_name(namespace, name), encode(RECORD))
    assert refused.value.reason == "foreign_record"


def test_a_name_of_another_schema_is_refused() -> None:
    key = subjects.image_name("default", "debian/12")
    for version, reason in ((1, "older_schema"), (99, "newer_schema")):
        value = encode(RECORD.model_dump() | {"schema_version": version})
        with pytest.raises(VirtbusError) as refused:
            read_image_name(key, value)
        assert (refused.value.code, refused.value.reason) == (Code.UNSUPPORTED, reason)


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"name": "../etc/shadow"}, "name"),
        ({"name": "debian/12@" + DIGEST}, "name"),
        ({"name": URL}, "name"),
        ({"name": "a" * 127 + "/b"}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"namespace": "*"}, "namespace"),
        ({"namespace": "a.b"}, "namespace"),
        ({"spec": {}}, "spec.url"),
        ({"spec": {"url": "debian/12"}}, "spec.url"),
        ({"spec": {"url": "ftp://h/a"}}, "spec.url"),
        ({"spec": {"url": f"{URL}@{DIGEST}"}}, "spec.url"),
        ({"spec": {"url": f"{URL}?signature=x"}}, "spec.url"),
        ({"spec": {"url": "https://h/" + "a" * 2048}}, "spec.url"),
        ({"spec": {"url": URL + "\r\nX: y"}}, "spec.url"),
        ({"spec": {"url": URL, "digest": "5e" * 32}}, "spec.digest"),
        ({"spec": {"url": URL, "digest": DIGEST + "\n"}}, "spec.digest"),
        ({"spec": {"url": URL, "transport": "../key"}}, "spec.transport"),
        ({"spec": {"url": URL, "pull_policy": "Sometimes"}}, "spec.pull_policy"),
        ({"spec": {"url": URL, "login": "user:password"}}, "spec.login"),
        ({"revision": -1}, "revision"),
    ],
)
def test_a_bad_request_is_refused_with_the_path_of_the_field(
    asked: dict[str, Any], path: str
) -> None:
    good = {"name": "debian/12", "spec": {"url": URL}}
    with pytest.raises(VirtbusError) as refused:
        validate(ImageNameSet, good | asked)
    assert refused.value.code == Code.INVALID
    assert {detail.path for detail in refused.value.body.details} == {path}


def test_a_container_gets_its_default_registry() -> None:
    assert ImageNameSpec(url="docker://fedora").url == "docker://docker.io/library/fedora:latest"


def test_a_store_tells_targets_apart_by_url_digest_and_transport() -> None:
    first = ImageTarget(url=URL)
    others = [
        first.model_copy(update=change)
        for change in ({"url": URL + "x"}, {"digest": DIGEST}, {"transport": "corp"})
    ]
    names = {parse_image_ref("a")._replace(target=one).name for one in (first, *others)}
    assert len(names) == 4
    assert all(name.startswith("a#") for name in names)
    same = first.model_copy(update={"generation": 9, "pull_policy": "Always"})
    assert same.key == first.key


def test_a_pin_of_the_file_is_that_of_the_reference_or_of_the_target() -> None:
    plain = parse_image_ref("a")
    file = ImageTarget(url=URL, digest=DIGEST)
    container = ImageTarget(url="docker://docker.io/library/a:1", digest=DIGEST)
    assert plain.file_digest is None
    assert plain._replace(target=file).file_digest == DIGEST
    assert plain._replace(target=container).file_digest is None
    assert parse_image_ref(f"docker://a@{DIGEST}").file_digest is None


def test_a_target_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValidationError):
        ImageTarget(url="/etc/shadow")
