"""Golden bytes and JSON Schemas of every message, below `schemas/wire/`.

A golden file keeps an edition for every shape that a message ever had: a change of a model adds
one and leaves the earlier ones, and the tests decode them all with the model of today.
"""

import json
from typing import Any

from pydantic import BaseModel

from virtbus.schemas.envelope import Envelope
from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.generate_channels import messages
from virtbus.schemas.generate_examples import full, minimal
from virtbus.schemas.vm import SCHEMA_VERSION
from virtbus.schemas.wire import encode, encode_json, read

FOLDER = f"v{SCHEMA_VERSION}"


_OF_NODES = frozenset({"image_names", "image_digests"})
RETIRED = {
    **dict.fromkeys(("NodeRecord", "NodePage", "NodeDetail", "BusStatus"), _OF_NODES),
    "Tele": frozenset({"images"}),
}
"""Fields that earlier editions have and nobody reads any more, by message: ADR 0034."""


def models() -> tuple[type[BaseModel], ...]:
    """Every model whose bytes go over the bus as a whole, by name."""
    return tuple(sorted({*messages(), Envelope, ErrorBody}, key=lambda model: model.__name__))


def edition(model: type[BaseModel]) -> dict[str, Any]:
    """The bytes of today's two instances, with what they say."""
    return {
        kind: {"msgpack": encode(instance).hex(), "value": json.loads(encode_json(instance))}
        for kind, instance in (("full", full(model)), ("minimal", minimal(model)))
    }


def golden(model: type[BaseModel], kept: list[dict[str, Any]]) -> str:
    """The golden file, given the editions it has: with today's as the last."""
    today = edition(model)
    editions = kept if kept and kept[-1] == today else [*kept, today]
    return _json({"model": model.__name__, "editions": editions})


def editions(text: str) -> list[dict[str, Any]]:
    """The editions in a golden file."""
    found: list[dict[str, Any]] = json.loads(text)["editions"]
    return found


def unread(model: type[BaseModel], one: dict[str, Any]) -> list[str]:
    """The paths at which today's model reads an edition other than it was written."""
    found = []
    for kind, written in one.items():
        instance = read(model, bytes.fromhex(written["msgpack"]))
        now = json.loads(encode_json(instance))
        found += [f"{kind}{path}" for path in _lost(written["value"], now, "")]
    retired = RETIRED.get(model.__name__, frozenset())
    return [path for path in found if path.rpartition(".")[2] not in retired]


def _lost(written: Any, now: Any, path: str) -> list[str]:
    """Where `now` lacks or changes something of `written`; what it has more is no loss."""
    if isinstance(written, dict) and isinstance(now, dict):
        return [
            found
            for key, value in written.items()
            for found in (
                _lost(value, now[key], f"{path}.{key}") if key in now else [f"{path}.{key}"]
            )
        ]
    if isinstance(written, list) and isinstance(now, list) and len(written) == len(now):
        pairs = enumerate(zip(written, now, strict=True))
        return [found for i, (old, new) in pairs for found in _lost(old, new, f"{path}[{i}]")]
    return [] if written == now else [path]


def json_schema(model: type[BaseModel]) -> str:
    """The JSON Schema (2020-12) of what is read as `model`."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:virtbus:{FOLDER}:{model.__name__}",
    }
    return _json(head | model.model_json_schema(by_alias=True))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
