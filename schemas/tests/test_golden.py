"""The bytes of every message are fixed: a change is detected, and old bytes stay readable."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from virtbus.schemas import generate, generate_channels, generate_examples, generate_wire, subjects
from virtbus.schemas.generate_reference import all_models
from virtbus.schemas.model import SCHEMA_VERSION, Command, Fact
from virtbus.schemas.vm import Tombstone
from virtbus.schemas.wire import decode, encode, encode_json, read

ROOT = generate.ROOT
MODELS = generate_wire.models()
EDITIONS = [
    pytest.param(model, one, id=f"{model.__name__}-{number}-{kind}")
    for model in MODELS
    if generate.golden_path(ROOT, model).exists()
    for number, edition in enumerate(
        generate_wire.editions(generate.golden_path(ROOT, model).read_text(encoding="utf-8")), 1
    )
    for kind, one in edition.items()
]


def test_generated_files_match_the_code() -> None:
    assert generate.differences(generate.wire_files(ROOT), ROOT) == [], (
        f"a model changed: run `{generate.COMMAND}` (make docs), and commit schemas/wire with it"
    )


@pytest.mark.parametrize(("model", "written"), EDITIONS)
def test_every_edition_decodes_to_its_values(
    model: type[BaseModel], written: dict[str, object]
) -> None:
    assert generate_wire.unread(model, {"": written}) == []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_full_instance_survives_msgpack_and_json(model: type[BaseModel]) -> None:
    for instance in (generate_examples.full(model), generate_examples.minimal(model)):
        assert read(model, encode(instance)) == instance


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_full_instance_leaves_no_field_at_its_default(model: type[BaseModel]) -> None:
    said = decode(encode(generate_examples.full(model)))
    schema = model.model_json_schema(by_alias=True)
    assert set(said) == set(schema.get("properties", {}))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_equal_instances_have_equal_bytes(model: type[BaseModel]) -> None:
    assert encode(generate_examples.full(model)) == encode(generate_examples.full(model))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_stored_value_has_its_schema_version(model: type[BaseModel]) -> None:
    if "schema_version" in model.model_fields:
        said = decode(encode(generate_examples.minimal(model)))
        assert said["schema_version"] == SCHEMA_VERSION


def test_a_tombstone_has_its_mark() -> None:
    assert decode(encode(Tombstone(uid=generate_examples.UID)))["tombstone"] is True


def test_a_changed_shape_adds_an_edition_and_keeps_the_old_one() -> None:
    model = Tombstone
    old = {"full": {"msgpack": "80", "value": {}}}
    kept = generate_wire.editions(generate_wire.golden(model, [old]))
    assert kept == [old, generate_wire.edition(model)]
    assert generate_wire.editions(generate_wire.golden(model, kept)) == kept


def test_a_missing_field_is_reported_with_its_path() -> None:
    edition = generate_wire.edition(Tombstone)
    edition["full"]["value"]["reason"] = "taken over"
    assert generate_wire.unread(Tombstone, edition) == ["full.reason"]


def test_a_stale_file_and_an_empty_file_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    (tmp_path / "b.json").write_text("whose?")
    assert generate.differences({tmp_path / "a.json": "new"}, tmp_path) == [
        "a.json differs from the generated text",
        "b.json is of nothing in the code",
    ]


def test_every_model_is_part_of_a_message() -> None:
    def below(base: type[BaseModel]) -> set[type[BaseModel]]:
        return {found for one in base.__subclasses__() for found in ({one} | below(one))}

    ours = {one for one in below(Command) | below(Fact) if one.__module__.startswith("virtbus.sch")}
    in_process = {"ArmNic", "Arm", "Armed"}  # netd's unix socket, not the bus
    base = {"Paged"}  # of every page of a list
    assert {one.__name__ for one in ours - set(all_models())} == in_process | base


def test_every_subject_is_in_the_catalogue() -> None:
    made = {
        name
        for name, value in vars(subjects).items()
        if callable(value) and value.__module__ == subjects.__name__ and not name.startswith("_")
    }
    filters = {"vm_anywhere", "vm_all", "hosts_all", "ready_all", "tele_all", "events"}
    filters |= {"signing_keys", "watch_renewals"}
    assert made - filters == {channel.function for channel in generate_channels.CHANNELS}
    assert len(generate_channels.FILTERS) == len(filters)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_json_schema_names_every_field_of_the_full_instance(model: type[BaseModel]) -> None:
    schema = json.loads(generate_wire.json_schema(model))
    said = json.loads(encode_json(generate_examples.full(model)))
    assert set(said) == set(schema.get("properties", {}))


# --- AsyncAPI --------------------------------------------------------------------------------
DOCUMENT = yaml.safe_load((ROOT / "schemas" / "wire" / "asyncapi.yaml").read_text(encoding="utf-8"))


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


def test_every_reference_of_the_asyncapi_document_leads_somewhere() -> None:
    for reference in references(DOCUMENT):
        place = DOCUMENT
        for token in reference.removeprefix("#/").split("/"):
            assert token in place, reference
            place = place[token]


def test_the_asyncapi_document_has_an_operation_for_every_subject() -> None:
    assert DOCUMENT["asyncapi"] == "3.0.0"
    addresses = {one["address"] for one in DOCUMENT["channels"].values()} - {None}
    assert addresses == {channel.subject for channel in generate_channels.CHANNELS}
    used = {operation["channel"]["$ref"] for operation in DOCUMENT["operations"].values()}
    used |= {
        operation["reply"]["channel"]["$ref"]
        for operation in DOCUMENT["operations"].values()
        if "reply" in operation
    }
    assert used == {f"#/channels/{key}" for key in DOCUMENT["channels"]}
    assert {one["action"] for one in DOCUMENT["operations"].values()} == {"send", "receive"}


def test_the_parameters_of_an_address_are_described() -> None:
    for one in DOCUMENT["channels"].values():
        named = {part.strip("{}") for part in (one["address"] or "").split(".") if "{" in part}
        assert set(one.get("parameters", {})) == named


def test_the_server_requires_credentials() -> None:
    (server,) = DOCUMENT["servers"].values()
    assert server["protocol"] == "nats"
    assert server["security"] == [{"$ref": "#/components/securitySchemes/userPassword"}]
