"""The bytes of every message are fixed: a change is detected, and old bytes stay readable."""

import json
from importlib import import_module
from pkgutil import iter_modules

from pydantic import BaseModel

from virtbus import schemas
from virtbus.documents.examples import UID, full, minimal
from virtbus.documents.files import ROOT, golden_path
from virtbus.documents.reference import all_models
from virtbus.documents.wire import edition, editions, golden, json_schema, models, unread
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.vm import Tombstone
from virtbus.schemas.wire import decode, encode, encode_json, read

MODELS = models()


def test_every_edition_decodes_to_its_values() -> None:
    for model in MODELS:
        path = golden_path(ROOT, model)
        kept = editions(path.read_text(encoding="utf-8")) if path.exists() else []
        for number, written in enumerate(kept, 1):
            assert unread(model, written) == [], f"{model.__name__}, edition {number}"


def test_a_full_instance_survives_msgpack_and_json() -> None:
    for model in MODELS:
        for instance in (full(model), minimal(model)):
            assert read(model, encode(instance)) == instance


def test_a_full_instance_leaves_no_field_at_its_default() -> None:
    for model in MODELS:
        said = decode(encode(full(model)))
        schema = model.model_json_schema(by_alias=True)
        assert set(said) == set(schema.get("properties", {})), model.__name__


def test_equal_instances_have_equal_bytes() -> None:
    for model in MODELS:
        assert encode(full(model)) == encode(full(model))


def test_a_stored_value_has_its_schema_version() -> None:
    stored = [model for model in MODELS if "schema_version" in model.model_fields]
    for model in stored:
        assert decode(encode(minimal(model)))["schema_version"] == SCHEMA_VERSION, model.__name__


def test_a_tombstone_has_its_mark() -> None:
    assert decode(encode(Tombstone(uid=UID)))["tombstone"] is True


def test_a_changed_shape_adds_an_edition_and_keeps_the_old_one() -> None:
    model = Tombstone
    old = {"full": {"msgpack": "80", "value": {}}}
    kept = editions(golden(model, [old]))
    assert kept == [old, edition(model)]
    assert editions(golden(model, kept)) == kept


def test_a_missing_field_is_reported_with_its_path() -> None:
    written = edition(Tombstone)
    written["full"]["value"]["reason"] = "taken over"
    assert unread(Tombstone, written) == ["full.reason"]


def test_every_model_is_part_of_a_message() -> None:
    def below(base: type[BaseModel]) -> set[type[BaseModel]]:
        return {found for one in base.__subclasses__() for found in ({one} | below(one))}

    for module in iter_modules(schemas.__path__, "virtbus.schemas."):
        import_module(module.name)
    ours = {
        one
        for one in below(StrictModel) | below(LenientModel)
        if one.__module__.startswith("virtbus.sch")
    }
    # unix sockets of netd and the agent, not the bus
    in_process = {"ArmNic", "Arm", "Armed", "LocalEnd", "LocalEnded"}
    base = {"Paged"}  # of every page of a list
    assert {one.__name__ for one in ours - set(all_models())} == in_process | base


def test_a_json_schema_names_every_field_of_the_full_instance() -> None:
    for model in MODELS:
        schema = json.loads(json_schema(model))
        said = json.loads(encode_json(full(model)))
        assert set(said) == set(schema.get("properties", {})), model.__name__
