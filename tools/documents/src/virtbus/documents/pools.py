"""Generates docs/reference/pools.md: the table of pools and abilities."""

from virtbus.documents.kubevirt_fields import table
from virtbus.schemas.pool import ABILITIES, BUILT_IN, LOCAL, Abilities, PoolKind, abilities_of

ABOUT = {
    "shared": "several hosts reach the same data; the volume goes with its VM",
    "snapshots": "snapshots of running guests and by `--layered`, restores in place, linked clones",
    "copied_snapshots": "snapshots of VMs that are off, as copies; a new volume restores one",
    "backups": "backups of VMs that have a volume there, running or off",
    "clones": "a volume on an image exists at once; elsewhere, the image is copied",
    "grow": "`volume update --size`",
    "discard": "a discard in the guest frees space of the pool",
    "copies": "virtbus writes the first content: copies into a volume, and moves into the pool",
    "exports": "virtbus reads the data: exports, copies of a volume, and moves out of the pool",
    "assigned": "the operator makes the place of each volume, and assigns it in pools.toml",
}


def page() -> str:
    """Return the whole page."""
    pools = {"the pool `local`": BUILT_IN}
    pools |= {f"`{kind}`": able for kind, able in ABILITIES.items()}
    rows = [
        (f"`{name}`", *("yes" if getattr(able, name) else "no" for able in pools.values()), about)
        for name, about in _all(ABOUT)
    ]
    return "\n".join(
        [
            "# Pools",
            "",
            "This page lists what each kind of pool can do. A request that a pool cannot serve is"
            " refused with the reason and the next step. ../howto/pools.md describes the kinds, and"
            " ADR 0060 their limits.",
            "",
            *table(("Ability", *pools, "Meaning"), rows),
            "## Shared volumes",
            "",
            "A volume of each kind of pool may be shared (`access: shared`, ADR 0086). It has"
            f" none of these abilities, also where its pool has: {', '.join(_lacking())}. In a pool"
            " that several hosts reach, its VMs may be on several hosts.",
            "",
        ]
    )


def _lacking() -> list[str]:
    """Return the abilities of the pool `local` that its shared volumes lack."""
    able, shared = BUILT_IN, abilities_of(LOCAL, PoolKind.LOCAL, shared=True)
    names = Abilities._fields
    return [f"`{name}`" for name in names if getattr(able, name) and not getattr(shared, name)]


def _all(about: dict[str, str]) -> list[tuple[str, str]]:
    """Return each ability with its meaning; raise KeyError if `about` lacks an ability."""
    return [(name, about[name]) for name in Abilities._fields]
