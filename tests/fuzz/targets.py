"""Derives each user's subjects from the permissions and the catalogue of the bus.

A new subject or a new right of a credential is attacked without a change here.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from tests.e2e.platform import NODE
from tests.fuzz.ground import EVIL
from tests.fuzz.pool import Pool

from virtbus.bus.provisioning import permissions
from virtbus.bus.provisioning.permissions import Role
from virtbus.schemas.catalogue import CHANNELS, Channel, Plane

TRUSTED = frozenset({permissions.ADMIN, permissions.CONTROLLER})
"""They own the streams: their holder needs no attack."""
OF_THE_NODE = (".rpc.imaged.", ".rpc.netd.", ".ready.", ".progress.")
"""Attacks of the honest node's credentials: its services attack each other.

A node's other rights concern only itself. A node that attacks itself can lose only its own VMs.
"""
ASKED = frozenset({Plane.REQUEST, Plane.STREAM})


@dataclass(frozen=True, slots=True)
class Target:
    """One subject that a user may publish. `subject` has `{parameter}` and NATS's wildcards."""

    user: str
    id: str
    subject: str
    node: str
    message: type[BaseModel] | None
    enveloped: bool
    asked: bool
    """A handler answers every message."""

    def filled(self, rng: random.Random, pool: Pool) -> str:
        """Fill the parameters of a subject."""
        parts = {"uid": pool.uid(rng), "node": self.node, "verb": "console", "bucket": "st"}

        def parameter(found: "re.Match[str]") -> str:
            return parts.get(found[1]) or f"x{rng.randrange(4)}"

        subject = re.sub(r"\{(\w+)\}", parameter, self.subject)
        tokens = [pool.token(rng) if one in {"*", ">"} else one for one in subject.split(".")]
        if self.subject.endswith(">"):
            tokens += [pool.token(rng) for _ in range(rng.randrange(3))]
        return ".".join(tokens)


def matches(pattern: str, subject: str) -> bool:
    """Return True if a pattern of an allow-list matches the subject, by NATS's rules."""
    wanted, given = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(given) > place
        if place >= len(given) or (token not in {"*", given[place]}):
            return False
    return len(wanted) == len(given)


def targets() -> tuple[Target, ...]:
    """Return every target of every untrusted credential."""
    roles = [role for role in permissions.fixed() if role.user not in TRUSTED]
    found = [one for role in roles for one in _of(role, (NODE, EVIL))]
    for role in permissions.node_users(EVIL):
        found += _of(role, (EVIL,))
    for role in permissions.node_users(NODE):
        found += [
            one for one in _of(role, (NODE,)) if any(part in one.subject for part in OF_THE_NODE)
        ]
    return tuple(dict.fromkeys(found))


def _of(role: Role, nodes: tuple[str, ...]) -> Iterator[Target]:
    """Yield channels first, then the other subjects of the allow-list."""
    known = list(_known(role, nodes))
    yield from known
    for pattern in role.publish:
        literal = [re.sub(r"\{\w+\}", "x", one.subject) for one in known]
        if pattern.endswith(">") or not any(matches(pattern, one) for one in literal):
            node = role.node or nodes[0]
            asked = pattern.startswith("$JS.API") and "MSG.NEXT" not in pattern
            yield Target(role.user, f"raw {pattern}", pattern, node, None, False, asked)


def _known(role: Role, nodes: tuple[str, ...]) -> Iterator[Target]:
    for channel in CHANNELS:
        for node in nodes if "node" in channel.parameters else nodes[:1]:
            subject = _placed(channel, node)
            if any(matches(pattern, _sample(subject)) for pattern in role.publish):
                yield Target(
                    role.user,
                    f"{channel.id} on {node}" if "node" in channel.parameters else channel.id,
                    subject,
                    node,
                    channel.message,
                    channel.enveloped,
                    channel.plane in ASKED or subject.startswith("$KV"),
                )
        if channel.plane is Plane.STREAM and channel.function == "rpc":
            for node in nodes:
                subject = f"{_placed(channel, node)}.{{session}}"
                if any(matches(pattern, _sample(subject)) for pattern in role.publish):
                    name = f"{channel.id}.input on {node}"
                    yield Target(role.user, name, subject, node, channel.reply, True, False)


def _placed(channel: Channel, node: str) -> str:
    return channel.subject.replace("{node}", node)


def _sample(subject: str) -> str:
    """Fill a template with literals; kinds of events are two tokens."""
    return re.sub(r"\{\w+\}", "x", subject)
