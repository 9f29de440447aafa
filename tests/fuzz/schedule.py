"""Draws from a seed which credential sends which message, in which order. Pure.

A turn is drawn only from the seed and its number, so any part of a run can be repeated.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.e2e.platform import NODE
from tests.fuzz.aimed import AIMED
from tests.fuzz.ground import EVIL
from tests.fuzz.mutations import Message, drawn
from tests.fuzz.pool import Pool
from tests.fuzz.targets import Target, matches

from virtbus.bus.provisioning import permissions

AIMED_SHARE = 0.12
"""Shares of the turns; each has several messages."""
AGAIN_SHARE = 0.04
"""Turns that repeat an earlier one, with its ids."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One message; `target` is a name of the coverage, `number` that of its turn."""

    number: int
    user: str
    target: str
    subject: str
    asked: bool
    message: Message


class Schedule:
    """The turns of a seed."""

    def __init__(self, seed: int, targets: Sequence[Target]) -> None:
        self._seed = seed
        self._targets = targets
        self.pool = Pool(seed)

    def turns(self, first: int = 0) -> Iterator[list[Shot]]:
        """Yield turns without end, from turn `first` on."""
        number = first
        while True:
            yield self.turn(number)
            number += 1

    def turn(self, number: int) -> list[Shot]:
        """Return the messages of one turn."""
        rng = random.Random(f"{self._seed}/{number}")
        share = rng.random()
        shots = [self._drawn(rng, number)]
        if share < AIMED_SHARE:
            shots += self._aimed(rng, number)
        elif share < AIMED_SHARE + AGAIN_SHARE and number:
            shots += self.turn(rng.randrange(number))
        return shots

    def _drawn(self, rng: random.Random, number: int) -> Shot:
        target = self._dealt(number)
        subject = target.filled(rng, self.pool)
        message = drawn(rng, self.pool, target.message, subject, enveloped=target.enveloped)
        if number < len(self._targets):  # each handler gets at least one message
            message = replace(message, reply="")
        return Shot(number, target.user, target.id, subject, target.asked, message)

    def _dealt(self, number: int) -> Target:
        """Yield every target once before any target twice."""
        deal, place = divmod(number, len(self._targets))
        order = random.Random(f"{self._seed}/deal/{deal}").sample(
            range(len(self._targets)), len(self._targets)
        )
        return self._targets[order[place]]

    def _aimed(self, rng: random.Random, number: int) -> Iterator[Shot]:
        attack = rng.choice(AIMED)
        for user, subject, message in attack(rng, self.pool):
            if may_send(user, subject):
                asked = ".rpc." in subject or ".api." in subject or subject.startswith("$KV")
                yield Shot(number, user, f"aimed {attack.__name__}", subject, asked, message)


def may_send(user: str, subject: str) -> bool:
    """Return True if the credential has the right."""
    patterns = _rights().get(user, ())
    return any(matches(pattern, subject) for pattern in patterns)


@functools.cache
def _rights() -> dict[str, tuple[str, ...]]:

    roles = (*permissions.fixed(), *permissions.node_users(EVIL), *permissions.node_users(NODE))
    return {role.user: role.publish for role in roles}
