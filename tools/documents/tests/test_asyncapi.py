"""The AsyncAPI document is consistent and has every subject."""

from typing import Any

import pytest
import yaml

from virtbus.documents.files import ROOT
from virtbus.schemas.catalogue import CHANNELS


@pytest.fixture(scope="module")
def document() -> Any:
    text = (ROOT / "schemas" / "wire" / "asyncapi.yaml").read_text(encoding="utf-8")
    return yaml.load(text, yaml.CSafeLoader)  # the loader in Python takes seconds


def references(value: object) -> set[str]:
    match value:
        case {"$ref": str(reference)}:
            return {reference}
        case dict():
            return {found for one in value.values() for found in references(one)}
        case list():
            return {found for one in value for found in references(one)}
        case _:
            return set()


def test_every_reference_of_the_asyncapi_document_leads_somewhere(document: Any) -> None:
    for reference in references(document):
        place = document
        for token in reference.removeprefix("#/").split("/"):
            assert token in place, reference
            place = place[token]


def test_the_asyncapi_document_has_an_operation_for_every_subject(document: Any) -> None:
    assert document["asyncapi"] == "3.0.0"
    addresses = {one["address"] for one in document["channels"].values()} - {None}
    assert addresses == {channel.subject for channel in CHANNELS}
    used = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    used |= {
        operation["reply"]["channel"]["$ref"]
        for operation in document["operations"].values()
        if "reply" in operation
    }
    assert used == {f"#/channels/{key}" for key in document["channels"]}
    assert {one["action"] for one in document["operations"].values()} == {"send", "receive"}


def test_the_parameters_of_an_address_are_described(document: Any) -> None:
    for one in document["channels"].values():
        named = {part.strip("{}") for part in (one["address"] or "").split(".") if "{" in part}
        assert set(one.get("parameters", {})) == named


def test_the_server_requires_credentials(document: Any) -> None:
    (server,) = document["servers"].values()
    assert server["protocol"] == "nats"
    assert server["security"] == [{"$ref": "#/components/securitySchemes/userPassword"}]
