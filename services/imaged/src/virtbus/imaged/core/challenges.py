"""How a registry wants to be told who asks, and which server may be told (SRC-12).

`WWW-Authenticate`: RFC 9110, 11.6.1; tokens: the distribution project's "Token Authentication".
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from virtbus.schemas.container import ContainerRef
from virtbus.schemas.registry_login import DOCKER_HUB

HUB_HOST = "registry-1.docker.io"
"""Where the API of docker.io is."""
REALMS = {DOCKER_HUB: "auth.docker.io", "registry.gitlab.com": "gitlab.com"}
"""The hosts that give tokens for well-known registries, besides each registry itself."""
MAX_TOKEN = 64 * 1024
_PARAMETER = re.compile(r'([a-z]{1,16})="([^"\\]{0,2048})"', re.IGNORECASE)
_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_TOKEN}}}")


class Challenge(NamedTuple):
    """What to do: `realm` is where to get a token, empty for a password with each request."""

    realm: str = ""
    service: str = ""


def challenge_of(headers: Iterable[str]) -> Challenge | None:
    """The first challenge that can be met, None where there is none."""
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
    """Where a token to pull `ref` comes from; the scope is ours, whatever the challenge asks."""
    query = {"service": challenge.service} if challenge.service else {}
    query["scope"] = f"repository:{ref.repository}:pull"
    separator = "&" if urlsplit(challenge.realm).query else "?"
    return f"{challenge.realm}{separator}{urlencode(query)}"


def may_be_told(registry: str, base: str, realm: str, realms: Mapping[str, str]) -> bool:
    """Whether the token server `realm` may see the password for `registry` at the URL `base`.

    It must be the registry's own host, the one that is known for it, or the one in `realms`; and
    a password for https never goes out by http.
    """
    told, own = urlsplit(realm), urlsplit(base)
    if told.scheme not in {own.scheme, "https"}:
        return False
    allowed = {own.netloc, realms.get(registry) or REALMS.get(registry)}
    return told.netloc in allowed


def token_of(body: bytes) -> str:
    """The token in a token server's answer, empty where there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict):
        return ""
    token = value.get("token") or value.get("access_token")
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else ""
