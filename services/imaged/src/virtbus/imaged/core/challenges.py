"""How a registry wants to be told who asks, and which server may be told (SRC-12).

`WWW-Authenticate`: RFC 9110, 11.6.1; tokens: the distribution project's "Token Authentication".
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from virtbus.schemas.container import DOCKER_HUB, ContainerRef

HUB_HOST = "registry-1.docker.io"
"""Where the API of docker.io is."""
HUB_KEY = "https://index.docker.io/v1/"
"""How `docker login` names it."""
REALMS = {DOCKER_HUB: "auth.docker.io", "registry.gitlab.com": "gitlab.com"}
"""The hosts that give tokens for well-known registries, besides each registry itself."""
MAX_TOKEN = 64 * 1024
_PARAMETER = re.compile(r'([a-z]{1,16})="([^"\\]{0,2048})"', re.IGNORECASE)
_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_TOKEN}}}")


class Challenge(NamedTuple):
    """What to do: `realm` is where to get a token, empty for a password with each request."""

    realm: str = ""
    service: str = ""


class Login(NamedTuple):
    """A user's name and password, for one registry."""

    user: str
    password: str

    @property
    def header(self) -> str:
        """The value of `Authorization`."""
        text = f"{self.user}:{self.password}".encode()
        return "Basic " + base64.b64encode(text).decode()


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


def login_for(ref: ContainerRef, text: bytes) -> Login | None:
    """The login for `ref` in a `config.json` of Docker's or podman's: the longest name that fits.

    Raises:
        ValueError: it cannot be read; what it holds is not repeated.
    """
    auths = _auths(text)
    parts = ref.image.split("/")
    names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    names += [f"https://{ref.registry}", f"http://{ref.registry}"]
    names += [HUB_KEY, f"index.{DOCKER_HUB}"] if ref.registry == DOCKER_HUB else []
    entry = next((auths[name] for name in names if name in auths), None)
    return _login(entry) if entry is not None else None


def _auths(text: bytes) -> dict[str, object]:
    try:
        value = json.loads(text)
        auths = dict(value.get("auths", {}).items())
        return {name.removesuffix("/") if name != HUB_KEY else name: auths[name] for name in auths}
    except (ValueError, RecursionError, AttributeError, TypeError):
        msg = 'it must be {"auths": {"<registry>": {"auth": "<base64 of user:password>"}}}'
        raise ValueError(msg) from None


def _login(entry: object) -> Login:
    if isinstance(entry, dict):
        user, password = entry.get("username"), entry.get("password")
        if isinstance(entry.get("auth"), str):
            try:
                text = base64.b64decode(entry["auth"], validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                text = ""
            user, colon, password = text.partition(":")
            user = user if colon else None
        if user and isinstance(user, str) and isinstance(password, str):
            return Login(user, password)
    msg = "an entry needs auth (base64 of user:password), or username and password"
    raise ValueError(msg)
