"""Parses a registry's login challenge, and decides which servers may get the login (SRC-12).

`WWW-Authenticate` is specified in RFC 9110, 11.6.1. Tokens are specified in the distribution
project's "Token Authentication".
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from virtbus.schemas.container import ContainerRef
from virtbus.schemas.registry_login import DOCKER_HUB

HUB_HOST = "registry-1.docker.io"
"""The API server of docker.io."""
REALMS = {DOCKER_HUB: "auth.docker.io", "registry.gitlab.com": "gitlab.com"}
"""The token servers of well-known registries. A registry may also issue its tokens itself."""
MAX_TOKEN = 64 * 1024
_PARAMETER = re.compile(r'([a-z]{1,16})="([^"\\]{0,2048})"', re.IGNORECASE)
_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_TOKEN}}}")


class Challenge(NamedTuple):
    """The required login. `realm` is the token server's URL.

    If `realm` is empty, the requests to the registry carry the password.
    """

    realm: str = ""
    service: str = ""


def challenge_of(headers: Iterable[str]) -> Challenge | None:
    """Return the first supported challenge; None without a supported challenge."""
    for header in headers:
        scheme, _, rest = header.strip().partition(" ")
        if scheme.lower() == "bearer":
            found = {key.lower(): value for key, value in _PARAMETER.findall(rest[:8192])}
            if found.get("realm"):
                return Challenge(found["realm"], found.get("service", ""))
        elif scheme.lower() == "basic":
            return Challenge()
    return None


def token_url(challenge: Challenge, ref: ContainerRef) -> str:
    """Return the token server's URL for a token to pull `ref`. The challenge's scope is ignored."""
    query = {"service": challenge.service} if challenge.service else {}
    query["scope"] = f"repository:{ref.repository}:pull"
    separator = "&" if urlsplit(challenge.realm).query else "?"
    return f"{challenge.realm}{separator}{urlencode(query)}"


def may_get_login(registry: str, base: str, realm: str, realms: Mapping[str, str]) -> bool:
    """Return True if the token server `realm` may get the password for `registry`.

    The token server must be the registry's own host, which is in the URL `base`, or the registry's
    token server in `realms` or REALMS. If `base` has https, `realm` must have https, too.
    """
    server, own = urlsplit(realm), urlsplit(base)
    if server.scheme not in {own.scheme, "https"}:
        return False
    allowed = {own.netloc, realms.get(registry) or REALMS.get(registry)}
    return server.netloc in allowed


def token_of(body: bytes) -> str:
    """Return the token in a token server's answer; empty if the answer has no valid token."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict):
        return ""
    token = value.get("token") or value.get("access_token")
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else ""
