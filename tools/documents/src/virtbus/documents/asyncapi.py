"""Builds `schemas/wire/asyncapi.yaml`: the message catalogue as an AsyncAPI 3.0 document.

The actions of operations are from virtbus' point of view. Clients send the messages of an operation
`receive`, and processes of virtbus send the messages of an operation `send`.
"""

from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from virtbus.bus.client.message_format import JSON, MSGPACK
from virtbus.documents.wire import models
from virtbus.schemas.catalogue import CHANNELS, Channel, Plane
from virtbus.schemas.channel_parameters import PARAMETERS

_REPLY_OF_NONE = {"type": "object", "description": "a plain map"}


def document() -> str:
    """Return the document as YAML."""
    return yaml.safe_dump(_root(), sort_keys=False, allow_unicode=True, width=100)


def _root() -> dict[str, Any]:
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for channel in CHANNELS:
        key = _key(channel)
        channels[key] = _channel(channel)
        if _replied(channel):
            channels[f"{key}_reply"] = _reply_channel(channel)
        operations[key] = _operation(channel)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "virtbus",
            "version": "1.0.0",
            "description": "Virtual machines on a fleet of Linux hosts over NATS. Bodies are "
            f"msgpack; requests of `virtbus.api.v1` may be JSON (first byte `{{`), and are then "
            f"answered in JSON. Every message carries its Content-Type ({MSGPACK} or {JSON}). "
            "Errors are answers with the headers Nats-Service-Error and Nats-Service-Error-Code.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": MSGPACK,
        "servers": {
            "nats": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "the embedded server of `virtbus up`, or your own",
                "security": [{"$ref": "#/components/securitySchemes/userPassword"}],
            }
        },
        "channels": channels,
        "operations": operations,
        "components": {
            "securitySchemes": {
                "userPassword": {
                    "type": "userPassword",
                    "description": "one user per role: client, controller, node-<id>, admin; each "
                    "may publish and subscribe only what its role needs",
                }
            },
            "messageTraits": {"traced": {"headers": _headers()}},
            "messages": {"Error": _error()},
            "schemas": _schemas(),
        },
    }


def _key(channel: Channel) -> str:
    return channel.id.replace(".", "_")


def _replied(channel: Channel) -> bool:
    return channel.plane in {Plane.REQUEST, Plane.STREAM}


def _headers() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "Content-Type": {"type": "string", "enum": [MSGPACK, JSON]},
            "traceparent": {"type": "string", "description": "W3C Trace Context"},
        },
    }


def _error() -> dict[str, Any]:
    return {
        "name": "error",
        "title": "A refusal",
        "headers": {
            "type": "object",
            "properties": {
                "Nats-Service-Error": {"type": "string"},
                "Nats-Service-Error-Code": {"type": "string"},
            },
            "required": ["Nats-Service-Error", "Nats-Service-Error-Code"],
        },
        "payload": {
            "type": "object",
            "properties": {"error": {"$ref": "#/components/schemas/ErrorBody"}},
            "required": ["error"],
        },
    }


def _schemas() -> dict[str, Any]:
    _, defined = models_json_schema(
        [(model, "validation") for model in models()],
        by_alias=True,
        ref_template="#/components/schemas/{model}",
    )
    return dict(sorted(defined["$defs"].items()))


def _payload(model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return dict(_REPLY_OF_NONE)
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _message(channel: Channel) -> dict[str, Any]:
    payload = _payload(channel.message)
    if channel.enveloped:
        envelope = {"$ref": "#/components/schemas/Envelope"}
        payload = {"allOf": [envelope, {"type": "object", "properties": {"data": payload}}]}
    return {
        "name": channel.id,
        "title": channel.about,
        "traits": [{"$ref": "#/components/messageTraits/traced"}],
        "payload": payload,
    }


def _channel(channel: Channel) -> dict[str, Any]:
    made: dict[str, Any] = {
        "address": channel.subject,
        "title": f"{channel.plane}: {channel.about}",
        "messages": {"message": _message(channel)},
    }
    if channel.parameters:
        made["parameters"] = {
            name: {"description": PARAMETERS[name]} for name in channel.parameters
        }
    return made


def _reply_channel(channel: Channel) -> dict[str, Any]:
    reply = {
        "name": f"{channel.id}.reply",
        "title": "The data itself, without an envelope",
        "traits": [{"$ref": "#/components/messageTraits/traced"}],
        "payload": _payload(channel.reply),
    }
    return {
        "address": None,
        "title": f"the requester's inbox, for answers of {channel.id}",
        "messages": {"reply": reply, "error": {"$ref": "#/components/messages/Error"}},
    }


def _operation(channel: Channel) -> dict[str, Any]:
    key = _key(channel)
    made: dict[str, Any] = {
        "action": "receive" if channel.sender == "client" else "send",
        "channel": {"$ref": f"#/channels/{key}"},
        "title": channel.about,
        "description": f"{channel.sender} to {channel.receiver}",
        "messages": [{"$ref": f"#/channels/{key}/messages/message"}],
    }
    if _replied(channel):
        made["reply"] = {
            "address": {"location": "$message.header#/reply"},
            "channel": {"$ref": f"#/channels/{key}_reply"},
            "messages": [
                {"$ref": f"#/channels/{key}_reply/messages/{name}"} for name in ("reply", "error")
            ],
        }
    return made
