"""Generates golden bytes and JSON Schemas of all messages, below `schemas/wire/`.

A golden file has an edition for each shape that its message has had. A change of the model adds an
edition. The tests decode all editions with the current model.
"""

import json
from typing import Any

from pydantic import BaseModel

from virtbus.documents.examples import full, minimal
from virtbus.schemas.catalogue import CHANNELS
from virtbus.schemas.envelope import Envelope
from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.wire import encode, encode_json, read

FOLDER = f"v{SCHEMA_VERSION}"


_OF_NODES = frozenset({"image_names", "image_digests"})
RETIRED = {
    **dict.fromkeys(("NodeRecord", "NodePage", "NodeDetail", "BusStatus"), _OF_NODES),
    "Tele": frozenset({"images"}),
}
"""Fields of earlier editions that services no longer read, by message (ADR 0034)."""


def models() -> tuple[type[BaseModel], ...]:
    """Return every model that is sent as a whole message, sorted by name."""
    said = {model for one in CHANNELS for model in (one.message, one.reply) if model}
    return tuple(sorted({*said, Envelope, ErrorBody}, key=lambda model: model.__name__))


def edition(model: type[BaseModel]) -> dict[str, Any]:
    """Return the msgpack bytes and the JSON value of a model's full and minimal instances."""
    return {
        kind: {"msgpack": encode(instance).hex(), "value": json.loads(encode_json(instance))}
        for kind, instance in (("full", full(model)), ("minimal", minimal(model)))
    }


def golden(model: type[BaseModel], kept: list[dict[str, Any]]) -> str:
    """Return the text of a golden file: the kept editions and, if new, the current edition."""
    today = edition(model)
    editions = kept if kept and kept[-1] == today else [*kept, today]
    return _json({"model": model.__name__, "editions": editions})


def editions(text: str) -> list[dict[str, Any]]:
    """Return the editions in a golden file."""
    found: list[dict[str, Any]] = json.loads(text)["editions"]
    return found


def unread(model: type[BaseModel], one: dict[str, Any]) -> list[str]:
    """Return the paths in an edition that the current model drops or changes."""
    found = []
    for kind, written in one.items():
        instance = read(model, bytes.fromhex(written["msgpack"]))
        now = json.loads(encode_json(instance))
        found += [f"{kind}{path}" for path in _lost(written["value"], now, "")]
    retired = RETIRED.get(model.__name__, frozenset())
    return [path for path in found if path.rpartition(".")[2] not in retired]


def _lost(written: Any, now: Any, path: str) -> list[str]:
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
    """Return the JSON Schema (2020-12) of a model."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:virtbus:{FOLDER}:{model.__name__}",
    }
    return _json(head | model.model_json_schema(by_alias=True))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
