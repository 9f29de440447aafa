"""Container images by name: Docker's short names, KubeVirt's fields, no ambiguous name."""

import pytest
from pydantic import ValidationError

from virtbus.schemas.container import ContainerDisk, ImagePullPolicy, check_path, parse_locator
from virtbus.schemas.image import parse_image_ref
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.wire import spec_hash

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("image", "ref"),
    [
        ("fedora", "docker://docker.io/library/fedora:latest"),
        ("team/fedora:40", "docker://docker.io/team/fedora:40"),
        ("index.docker.io/team/f", "docker://docker.io/team/f:latest"),
        ("quay.io/containerdisks/fedora", "docker://quay.io/containerdisks/fedora:latest"),
        ("Quay.IO/a/b__c:V1.0_x", "docker://quay.io/a/b__c:V1.0_x"),
        ("localhost/a", "docker://localhost/a:latest"),
        ("localhost:5000/a/b/c", "docker://localhost:5000/a/b/c:latest"),
        ("registry:5000/a", "docker://registry:5000/a:latest"),
        ("[::1]:5000/a:1", "docker://[::1]:5000/a:1"),
        (f"quay.io/a/b@{D}", f"docker://quay.io/a/b@{D}"),
        (f"quay.io/a/b:1@{D}", f"docker://quay.io/a/b:1@{D}"),
    ],
)
def test_an_image_is_its_full_reference(image: str, ref: str) -> None:
    assert ContainerDisk(image=image).ref == ref
    source = parse_image_ref(f"docker://{image}")
    assert (source.ref, source.is_container, source.is_url) == (ref, True, True)
    assert parse_image_ref(ref).ref == ref
    parsed = parse_locator(source.locator, pinned=source.digest is not None)
    assert parsed.locator == source.locator
    with_path = ContainerDisk(image=image, path="/disk/a.img").ref
    assert parse_image_ref(with_path).ref == with_path


@pytest.mark.parametrize(
    "image",
    ["", "UPPER/x", "a//b", "a/", "/a", "a:", "a:b:c", "a@sha256:12", f"a@{D}@{D}", "a@", "a b",
     "docker://a", "https://quay.io/a", "a..b/c", "-a", "a/../b", "quay.io/A/b", "a\n",
     "é/x", f"a@md5:{'0' * 32}", "a" * 300, "x:99999999/a", "user@host/a", "a?b"],
)  # fmt: skip
def test_an_invalid_image_reference_is_refused(image: str) -> None:
    with pytest.raises(ValidationError):
        ContainerDisk(image=image)
    with pytest.raises(ValueError, match="must be"):
        parse_image_ref(f"docker://{image}" if "//" not in image else f"docker://{image}//")


def test_an_image_has_its_path_next_to_it() -> None:
    with pytest.raises(ValidationError, match="container image"):
        ContainerDisk(image="a#/x")


@pytest.mark.parametrize(
    "path",
    ["", "/", "disk/a", "/disk/", "/disk/../x", "/./x", "/..", "//x", "/a b", "/a@b", "/a#b",
     "/a?b", "/a\0", "/" + "x" * 256, "/x" * 17],
)  # fmt: skip
def test_a_path_is_absolute_and_of_a_file(path: str) -> None:
    with pytest.raises(ValidationError):
        ContainerDisk(image="a", path=path)
    with pytest.raises(ValueError, match="must be"):
        parse_image_ref(f"docker://a#{path}")


@pytest.mark.parametrize("path", ["/disk/a.qcow2", "/a", "/disk/..a", "/disk/.hidden", "/é/x"])
def test_a_path_may_be_any_file(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("a", ImagePullPolicy.ALWAYS),
        ("a:latest", ImagePullPolicy.ALWAYS),
        (f"a:latest@{D}", ImagePullPolicy.ALWAYS),
        ("a:1", ImagePullPolicy.IF_NOT_PRESENT),
        (f"a@{D}", ImagePullPolicy.IF_NOT_PRESENT),
    ],
)
def test_the_pull_policy_is_kubernetes_default_by_tag(image: str, policy: ImagePullPolicy) -> None:
    assert ContainerDisk(image=image).pull_policy is policy
    never = ContainerDisk(image=image, image_pull_policy=ImagePullPolicy.NEVER)
    assert never.pull_policy is ImagePullPolicy.NEVER


def test_a_spec_without_a_container_disk_keeps_the_hash_that_it_had_before() -> None:
    spec = VmSpec.model_validate({"volumes": [{"name": "a", "empty_disk": {"capacity": 2**20}}]})
    before = "f37befff1a8db6809d47a79e32051e4c49db5bc9eed9af716b208cdb7d57d5a7"
    assert spec_hash(spec) == before
