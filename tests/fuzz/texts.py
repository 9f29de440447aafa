"""Hostile text for parsers: user data, network data, manifests."""

import random

HEAD = "#cloud-config\n"


def hostile_text(rng: random.Random) -> str:
    """Return a document for a YAML or JSON parser."""
    return rng.choice(
        (
            *(merges(levels) for levels in (12, 24, 200)),
            *(aliases(levels) for levels in (9, 30)),
            *(HEAD + "[" * depth for depth in (50, 900, 30_000)),
            HEAD + "".join(f"{'  ' * n}a:\n" for n in range(200)),
            HEAD + "!!python/object/apply:os.system [id]\n",
            HEAD + "x: " + "1:" * 20_000 + "1\n",
            HEAD + "? " * 2000,
            HEAD + "k: 'v'\n" * 5000,
            HEAD + 'x: "' + "\\U0001f600" * 4000 + '"\n',
        )
    )


def merges(levels: int) -> str:
    """Merge keys, each of which doubles the one above (`<<: [*a, *a]`)."""
    lines = ["#cloud-config", "a0: &a0 {k: v}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def aliases(levels: int) -> str:
    """A billion laughs."""
    lines = ["#cloud-config", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"
