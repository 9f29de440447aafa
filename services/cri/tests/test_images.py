"""The images of pods: their names, digests, and the CRI's own references to them."""

import base64
import json
from pathlib import Path

import pytest
from grpc import StatusCode
from services.cri.tests.world import DIGEST, OTHER_DIGEST, Fleet, Kubelet

from virtbus.cri.core import image_refs
from virtbus.schemas.errors import Code, VirtbusError


@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("tiny", ("tiny",)),
        ("tiny:latest", ("tiny",)),
        ("debian/12:v3", ("debian/12:v3",)),
        ("virtlet.cloud/tiny", ("tiny",)),
        ("virtlet.cloud/tiny:latest", ("tiny",)),
        (
            "virtlet.cloud/images.example/cirros.img:latest",
            ("images.example/cirros.img", "https://images.example/cirros.img"),
        ),
        ("quay.io/containerdisks/fedora:40", ("docker://quay.io/containerdisks/fedora:40",)),
        ("localhost:5000/disk:latest", ("docker://localhost:5000/disk:latest",)),
        (f"tiny@{DIGEST}", (f"tiny@{DIGEST}",)),
    ],
)
def test_a_name_has_one_meaning_in_a_fixed_order(name: str, references: tuple[str, ...]) -> None:
    assert image_refs.candidates(image_refs.parse(name)) == references


@pytest.mark.parametrize("name", ["", "tiny@sha256:12", "tiny@md5:x", "a b", "UPPER", "x@", "@y"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(VirtbusError, match="image"):
        image_refs.candidates(image_refs.parse(name))


def test_the_vm_gets_exactly_the_file_that_was_pulled() -> None:
    assert image_refs.pinned("tiny", DIGEST) == f"tiny@{DIGEST}"
    container_image = "docker://quay.io/containerdisks/fedora:40"
    assert image_refs.pinned(container_image, DIGEST) == container_image


async def test_an_image_is_known_by_name_and_id_after_its_pull(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    assert not (await kubelet.call("ImageStatus", image={"image": "tiny"})).HasField("image")
    sandbox = {"metadata": {"namespace": "team"}}
    pulled = await kubelet.call("PullImage", image={"image": "tiny:latest"}, sandbox_config=sandbox)
    assert pulled.image_ref == DIGEST
    assert fleet.asked("image.pull")[0] == {"ref": "tiny", "node": "n1", "namespace": "team"}
    for name in ("tiny", "tiny:latest", DIGEST, f"tiny@{DIGEST}"):
        image = (await kubelet.call("ImageStatus", image={"image": name})).image
        assert (image.id, image.size, list(image.repo_tags)) == (DIGEST, 1000, ["tiny:latest"])
    answer = await kubelet.call("ImageStatus", image={"image": f"tiny@{OTHER_DIGEST}"})
    assert not answer.HasField("image")


async def test_a_verbose_status_shows_what_each_name_stands_for(kubelet: Kubelet) -> None:
    for name in ("tiny", f"tiny@{DIGEST}"):
        await kubelet.call("PullImage", image={"image": name})
    assert not (await kubelet.call("ImageStatus", image={"image": "tiny"})).info
    answer = await kubelet.call("ImageStatus", image={"image": "tiny"}, verbose=True)
    told = json.loads(answer.info["info"])["virtbusImages"]
    assert [(one["ref"], one["virtual_bytes"]) for one in told] == [(f"tiny@{DIGEST}", 5000)] * 2
    answer = await kubelet.call("ImageStatus", image={"image": "other"}, verbose=True)
    assert not answer.info


PRIVATE = "quay.io/team/disk:1"


@pytest.mark.parametrize(
    "auth",
    [
        {"username": "bob", "password": "hunter2"},
        {"auth": base64.b64encode(b"bob:hunter2").decode(), "server_address": "other.example"},
    ],
)
async def test_the_login_of_a_pull_secret_goes_to_imaged_and_is_stored_nowhere(
    tmp_path: Path,
    fleet: Fleet,
    kubelet: Kubelet,
    caplog: pytest.LogCaptureFixture,
    auth: dict[str, str],
) -> None:
    fleet.images[f"docker://{PRIVATE}"] = DIGEST
    await kubelet.call("PullImage", image={"image": PRIVATE}, auth=auth)
    (asked,) = fleet.asked("image.pull")
    login = base64.b64encode(b"bob:hunter2").decode()
    assert json.loads(asked["pull_secret"]) == {"auths": {"quay.io": {"auth": login}}}
    fleet.errors["image.pull"] = VirtbusError(Code.DENIED, "login_refused", "no")
    code, text = await kubelet.refused("PullImage", image={"image": PRIVATE}, auth=auth)
    assert code is StatusCode.PERMISSION_DENIED
    stored = [path.read_text() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    for secret in ("hunter2", login):
        assert secret not in text
        assert secret not in caplog.text
        assert not [one for one in stored if secret in one]


async def test_a_login_that_no_registry_takes_is_refused_without_its_text(kubelet: Kubelet) -> None:
    wrong = {"image": {"image": PRIVATE}, "auth": {"auth": "hunter2 is no base64"}}
    code, text = await kubelet.refused("PullImage", **wrong)
    assert (code, "hunter2" in text) == (StatusCode.INVALID_ARGUMENT, False)
    token = {"image": {"image": PRIVATE}, "auth": {"identity_token": "hunter2"}}
    code, text = await kubelet.refused("PullImage", **token)
    assert (code, "hunter2" in text) == (StatusCode.FAILED_PRECONDITION, False)
    assert "token" in text


async def test_an_image_of_no_registry_needs_no_login(fleet: Fleet, kubelet: Kubelet) -> None:
    auth = {"username": "bob", "password": "hunter2"}
    await kubelet.call("PullImage", image={"image": "tiny"}, auth=auth)
    assert "pull_secret" not in fleet.asked("image.pull")[0]


async def test_two_names_of_one_file_are_one_image(fleet: Fleet, kubelet: Kubelet) -> None:
    fleet.images["twin"] = DIGEST
    for name in ("tiny", "twin", "other"):
        await kubelet.call("PullImage", image={"image": name})
    images = (await kubelet.call("ListImages")).images
    assert {image.id: list(image.repo_tags) for image in images} == {
        DIGEST: ["tiny:latest", "twin:latest"],
        OTHER_DIGEST: ["other:latest"],
    }
    listed = await kubelet.call("ListImages", filter={"image": {"image": "twin"}})
    assert [list(image.repo_tags) for image in listed.images] == [["tiny:latest", "twin:latest"]]
    (usage,) = (await kubelet.call("ImageFsInfo")).image_filesystems
    assert (usage.used_bytes.value, usage.inodes_used.value) == (2000, 2)


async def test_a_plain_name_is_not_the_image_that_was_pulled_by_its_digest(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    await kubelet.call("PullImage", image={"image": f"tiny@{DIGEST}"})
    fleet.images["tiny"] = OTHER_DIGEST
    await kubelet.call("PullImage", image={"image": "tiny"})
    image = (await kubelet.call("ImageStatus", image={"image": "tiny"})).image
    assert (image.id, list(image.repo_tags)) == (OTHER_DIGEST, ["tiny:latest"])
    image = (await kubelet.call("ImageStatus", image={"image": f"tiny@{DIGEST}"})).image
    assert (image.id, list(image.repo_tags)) == (DIGEST, [])


async def test_a_removal_by_one_name_removes_all_names_of_the_image(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.images["twin"] = DIGEST
    for name in ("tiny", "twin", "other"):
        await kubelet.call("PullImage", image={"image": name})
    await kubelet.call("RemoveImage", image={"image": "twin"})
    (left,) = (await kubelet.call("ListImages")).images
    assert list(left.repo_tags) == ["other:latest"]


async def test_a_pull_by_digest_gives_no_tag(kubelet: Kubelet) -> None:
    await kubelet.call("PullImage", image={"image": f"tiny@{DIGEST}"})
    (image,) = (await kubelet.call("ListImages")).images
    assert (list(image.repo_tags), list(image.repo_digests)) == ([], [f"tiny@{DIGEST}"])


async def test_a_removal_drops_only_the_reference(fleet: Fleet, kubelet: Kubelet) -> None:
    await kubelet.call("PullImage", image={"image": "tiny"})
    requests = len(fleet.requests)
    for _ in range(2):
        await kubelet.call("RemoveImage", image={"image": "tiny"})
    assert not (await kubelet.call("ListImages")).images
    assert not {name for name, _ in fleet.requests[requests:]} - {"node.get"}


async def test_a_failed_pull_says_why(kubelet: Kubelet) -> None:
    code, text = await kubelet.refused("PullImage", image={"image": "nothing"})
    assert (code, "nothing" in text) == (StatusCode.NOT_FOUND, True)
    code, text = await kubelet.refused("PullImage", image={"image": f"tiny@{OTHER_DIGEST}"})
    assert (code, "another digest" in text) == (StatusCode.FAILED_PRECONDITION, True)
    assert not (await kubelet.call("ListImages")).images


async def test_an_image_without_a_disk_has_its_reason(fleet: Fleet, kubelet: Kubelet) -> None:
    text = "registry.example/app:1 has no disk in /disk; give a container disk"
    fleet.errors["image.pull"] = VirtbusError(Code.UNSUPPORTED, "container_disk_missing", text)
    image = {"image": "registry.example/app:1"}
    code, told = await kubelet.refused("PullImage", image=image)
    assert code is StatusCode.FAILED_PRECONDITION
    assert "container_disk_missing" in told
    assert text in told
    assert not (await kubelet.call("ListImages")).images


async def test_a_name_of_virtlet_becomes_a_url_only_if_nobody_has_it(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.images["https://images.example/cirros.img"] = OTHER_DIGEST
    name = "virtlet.cloud/images.example/cirros.img"
    assert (await kubelet.call("PullImage", image={"image": name})).image_ref == OTHER_DIGEST
    fleet.images["images.example/cirros.img"] = DIGEST
    assert (await kubelet.call("PullImage", image={"image": name})).image_ref == DIGEST


async def test_a_container_needs_a_pulled_image(kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    config = {"metadata": {"name": "vm"}, "image": {"image": DIGEST}}
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, "PullImage" in text) == (StatusCode.NOT_FOUND, True)
