"""Names for the attackers: a fixed set for each seed, disjoint from those of the neighbours."""

import random
import uuid
from dataclasses import dataclass, field

from virtbus.documents.examples import UID

NAMESPACE = "hostile"
VMS = 24
IMAGES_PORT = 18080
"""Address of the hostile image server; the network namespace is the test's own."""
BRIDGE_PORT = 18082
TOKENS = ("x", "_", "_join", "console", "agent", "1", "KV_vm", "a" * 200, "\u00e9", "PING", "INFO")


@dataclass
class Pool:
    """VMs, images and tokens of a seed. `seen` adds uids from answers."""

    seed: int
    uids: tuple[str, ...] = ()
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed}/pool")
        self.uids = tuple(_uuid7(rng) for _ in range(VMS))

    @property
    def all_uids(self) -> set[str]:
        """Return every uid that an object of the attackers may have."""
        return {*self.uids, UID, *self.seen}

    def uid(self, rng: random.Random) -> str:
        return rng.choice((*self.uids, UID))

    def name(self, rng: random.Random) -> str:
        return f"h-{rng.randrange(VMS)}"

    def token(self, rng: random.Random) -> str:
        """Draw a token of a subject."""
        return rng.choice((*TOKENS, self.uid(rng)))

    def image(self, rng: random.Random) -> str:
        """Draw a reference to the image server of the attackers, or to nothing."""
        base = f"http://127.0.0.1:{IMAGES_PORT}"
        kind = rng.choice(("good", "slow", "garbage", "huge", "hang", "redirect", "short", "lies"))
        return rng.choice(
            (
                f"{base}/{kind}/{rng.randrange(200)}",
                f"docker://127.0.0.1:{IMAGES_PORT}/{kind}/disk:{rng.randrange(50)}",
                f"{base}/good/{rng.randrange(10_000)}?{'q' * rng.choice((1, 400, 1500))}",
                rng.choice(("nothing", "file:///etc/shadow", "file:///dev/zero", "../../x")),
            )
        )


def _uuid7(rng: random.Random) -> str:
    bits = rng.getrandbits(128)
    bits = bits & ~(0xF << 76) | (7 << 76)
    bits = bits & ~(0x3 << 62) | (2 << 62)
    return str(uuid.UUID(int=bits))
