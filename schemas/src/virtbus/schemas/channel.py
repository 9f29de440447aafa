"""Describes a channel: one subject with its kind, its messages, its sender and its receiver."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from virtbus.schemas import streams, subjects
from virtbus.schemas.channel_parameters import ASKERS, template


class Plane(StrEnum):
    """The kind of use of a subject."""

    REQUEST = "request"
    """One request, one answer."""
    STREAM = "stream of replies"
    """One request, many answers on the request's inbox."""
    CORE = "core message"
    """Published without an answer; may be lost."""
    RECORD = "record"
    """The last value of a key in a key-value bucket."""
    FACT = "fact"
    """A message that a stream keeps."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One subject. `message` is None for a purge; `reply` is None if there is no reply.

    `function` names the function of `virtbus.schemas.subjects` that returns the subject.
    """

    id: str
    subject: str
    plane: Plane
    message: type[BaseModel] | None
    reply: type[BaseModel] | None
    sender: str
    receiver: str
    about: str
    function: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names in braces in the subject, in order."""
        return tuple(re.findall(r"\{(\w+)\}", self.subject))

    @property
    def enveloped(self) -> bool:
        """Return True if messages have an envelope. Records do not (ADR 0002)."""
        return self.plane is not Plane.RECORD


def of_api(
    resource: str, verb: str, want: type[BaseModel], give: type[BaseModel] | None, about: str
) -> Channel:
    """Return the channel of a request to the API."""
    plane = Plane.STREAM if verb == "watch" else Plane.REQUEST
    return Channel(
        id=f"{resource}.{verb}",
        subject=template(subjects.api, resource=resource, verb=verb),
        plane=plane,
        message=want,
        reply=give,
        sender="client",
        receiver="controller",
        about=about,
        function="api",
    )


def of_node(
    service: str, verb: str, want: type[BaseModel], give: type[BaseModel], about: str
) -> Channel:
    """Return the channel of a request to a service of a node."""
    streamed = give is streams.StreamData
    return Channel(
        id=f"{service}.{verb}",
        subject=template(subjects.rpc, service=service, verb=verb),
        plane=Plane.STREAM if streamed else Plane.REQUEST,
        message=want,
        reply=give,
        sender="client" if streamed else ASKERS.get(verb, "nodeagent"),
        receiver="nodeagent" if service == "agent" else service,
        about=about,
        function="rpc",
    )


def core_or_stored(
    make: Callable[..., str], plane: Plane, model: type[BaseModel] | None, who: str, about: str
) -> Channel:
    """Return the channel of a message without an answer; `who` is `sender → receiver`."""
    name = make.__name__
    sender, _, receiver = who.partition(" → ")
    return Channel(
        name.replace("_", "."), template(make), plane, model, None, sender, receiver, about, name
    )


def ready(part: str, model: type[BaseModel], service: str, about: str) -> Channel:
    """Return the channel of a ready event."""
    subject = template(subjects.ready, part=part)
    return Channel(
        f"ready.{part}", subject, Plane.CORE, model, None, service, "nodeagent", about, "ready"
    )
