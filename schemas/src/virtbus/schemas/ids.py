"""Identifiers, with one grammar for subject tokens, file names and domain names.

In an id, a dot would add subject tokens, `*` and `>` could act as wildcards, and a slash would
leave a directory. Requests and stored values use `Id` and `Uid`, which refuse these characters
(BUS-01).
"""

import base64
import functools
import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from virtbus.schemas.id_grammar import ID_PATTERN as ID_PATTERN
from virtbus.schemas.id_grammar import is_id as is_id

_UID = re.compile(r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")

KNOWN = 4096
"""Size of the cache of checked ids. A program uses the same few ids again and again."""
UNPLACED = "_"
"""The node token of a VM that has no node yet, and of tombstones."""


def is_uid(text: str) -> bool:
    """Return True for a UUID in its canonical form, lower case."""
    return _UID.fullmatch(text) is not None


@functools.lru_cache(KNOWN)
def check_id(text: str) -> str:
    """Return `text` if it is an id, or raise a ValueError that states the grammar."""
    if not is_id(text):
        msg = "must be 1-63 characters of a-z, 0-9 and '-', starting with a letter or digit"
        raise ValueError(msg)
    return text


@functools.lru_cache(KNOWN)
def check_uid(text: str) -> str:
    """Return `text` in lower case if it is a canonical UUID, or raise ValueError."""
    lowered = text.lower()
    if _UID.fullmatch(lowered) is None:
        msg = "must be a UUID such as 0192f0c1-2d3e-7abc-8def-0123456789ab"
        raise ValueError(msg)
    return lowered


Id = Annotated[str, StringConstraints(max_length=63), AfterValidator(check_id)]
"""A name, namespace, node, disk or network id. An id is also a DNS label and a hostname."""


HOST_NAME_MAX, _DOMAIN_MAX = 64, 253
"""Linux limits a host's own name; DNS limits a name with its domain."""


def is_host_name(text: str, limit: int = _DOMAIN_MAX) -> bool:
    """Return True for DNS labels with dots between them, of at most `limit` characters."""
    return len(text) <= limit and all(map(is_id, text.split(".")))


def check_host_name(text: str) -> str:
    """Return `text` if it is a host's name, or raise ValueError."""
    if not is_host_name(text):
        msg = "must be DNS labels of a-z, 0-9 and '-' with dots between them, such as web.example"
        raise ValueError(msg)
    return text


HostName = Annotated[
    str, StringConstraints(max_length=HOST_NAME_MAX), AfterValidator(check_host_name)
]
"""A host's own name, short or with its domain."""
DomainHostName = Annotated[
    str, StringConstraints(max_length=_DOMAIN_MAX), AfterValidator(check_host_name)
]
"""A host's name with its domain."""

Uid = Annotated[str, StringConstraints(max_length=36), AfterValidator(check_uid)]
"""The identity of a VM, object or operation: a UUID in lower case (v7 if virtbus makes it)."""

_CLAIM = r"^[a-z0-9][a-z0-9-]{0,62}(/[0-9a-f-]{36})?$"
UnsignedRecord = Annotated[str, StringConstraints(max_length=100, pattern=_CLAIM)]
"""`NODE/UID` or `NODE`: the host's copy of one VM's record, or of all its VMs' records."""

_NAME = r"[a-z0-9][a-z0-9-]{0,62}"
_COPY = rf"^{_NAME}(/{_NAME}/{_NAME}(@[0-9a-f]{{32}})?)?$"
HostGroup = Annotated[str, StringConstraints(max_length=224, pattern=_COPY)]
"""`NODE/NAMESPACE/NAME@DIGEST`: a host's copy of a security group, with a digest of the copy.

Earlier clients sent `NODE/NAMESPACE/NAME`, or only `NODE`. Controllers refuse both.
"""


def name_token(name: str) -> str:
    """Return the subject token of a name or address: lower-case base32 without padding."""
    return base64.b32encode(name.encode()).decode().rstrip("=").lower()


def token_name(token: str) -> str:
    """Return the name from which `name_token` made the token; raises ValueError."""
    padding = "=" * (-len(token) % 8)
    return base64.b32decode(f"{token.upper()}{padding}").decode()
