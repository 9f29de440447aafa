"""Defines the grammar of ids; without pydantic, because some importing processes must be small."""

import re

ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
_ID = re.compile(ID_PATTERN)


def is_id(text: str) -> bool:
    """Return True for 1-63 characters of `a-z 0-9 -` that start with a letter or digit."""
    return _ID.fullmatch(text) is not None
