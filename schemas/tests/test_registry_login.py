"""A container disk's pull secret: one login of a config.json, and nothing else from it."""

import json
from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from virtbus.schemas.container import ContainerDisk

AUTH = "bWU6cGFzczp3b3Jk"
OTHER = "eW91OnNlY3JldA=="


def kept(image: str, auths: Mapping[str, object]) -> dict[str, object]:
    disk = ContainerDisk(image=image, image_pull_secret=json.dumps({"auths": auths, "x": 1}))
    again = ContainerDisk.model_validate(disk.model_dump())
    assert again == disk
    value: dict[str, object] = json.loads(disk.image_pull_secret or "")
    return value


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("quay.io/team/web:1", "quay.io"),
        ("quay.io/team/web:1", "https://quay.io"),
        ("quay.io/team/web:1", "quay.io/team"),
        ("web", "https://index.docker.io/v1/"),
        ("localhost:5000/web", "localhost:5000"),
    ],
)
def test_only_the_login_for_the_disks_registry_is_taken(image: str, name: str) -> None:
    registry = "docker.io" if image == "web" else image.partition("/")[0]
    auths = {name: {"auth": AUTH}, "other.example": {"auth": OTHER}}
    assert kept(image, auths) == {"auths": {registry: {"auth": AUTH}}}


def test_user_and_password_apart_are_a_login_too() -> None:
    entry = {"username": "me", "password": "pass:word"}
    assert kept("quay.io/a", {"quay.io": entry}) == {"auths": {"quay.io": {"auth": AUTH}}}


@pytest.mark.parametrize(
    "text",
    ["hunter2", "[]", '{"auths": {"quay.io": {"auth": "hunter2"}}}', '{"auths": {"a": {}}}', "{}"],
)
def test_a_pull_secret_without_the_login_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ContainerDisk(image="quay.io/a", image_pull_secret=text)
    errors = refused.value.errors(include_input=False, include_url=False)
    assert [error["loc"] for error in errors] == [("image_pull_secret",)]
    assert "hunter2" not in errors[0]["msg"]


def test_a_record_shows_that_there_is_a_secret_but_not_which() -> None:
    disk = ContainerDisk(
        image="a", image_pull_secret=json.dumps({"auths": {"docker.io": {"auth": AUTH}}})
    )
    shown = disk.without_secrets()
    assert shown.image_pull_secret == ""
    assert ContainerDisk.model_validate(shown.model_dump()) == shown
    assert ContainerDisk(image="a").without_secrets().image_pull_secret is None
