"""Checks domain names that guests get."""

import re
from collections.abc import Iterable

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE)
_MAX_CHARACTERS = 253


def is_domain(text: str) -> bool:
    """Return True if a domain name can be encoded: its labels and its length are within bounds."""
    return len(text) <= _MAX_CHARACTERS and _DOMAIN.fullmatch(text) is not None


def domains(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the valid names among `texts`, each once and without the dot at its end."""
    names = (text.removesuffix(".") for text in texts)
    return tuple(dict.fromkeys(name for name in names if is_domain(name)))
