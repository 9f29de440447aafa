"""Logins for registries, in the format of `docker login` and Kubernetes."""

import base64
import binascii
import json
from typing import NamedTuple

DOCKER_HUB = "docker.io"
HUB_KEY = "https://index.docker.io/v1/"
"""The key of Docker Hub in the `config.json` of `docker login`."""
SECRET_BYTES = 64 * 1024


class Login(NamedTuple):
    """A user's name and password for one registry."""

    user: str
    password: str

    @property
    def auth(self) -> str:
        """Return base64 of `user:password`, as used in files and headers."""
        return base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    @property
    def header(self) -> str:
        return f"Basic {self.auth}"

    def config(self, registry: str) -> str:
        return json.dumps({"auths": {registry: {"auth": self.auth}}})


def login_for(image: str, text: bytes) -> Login | None:
    """Return the login in `text`, a `config.json`, for the image `registry/repository`.

    The entry with the longest match is used. Return None if no entry matches.

    Raises:
        ValueError: `text` is invalid. The error does not quote the secret `text`.
    """
    auths = _auths(text)
    parts = image.split("/")
    registry = parts[0]
    names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    names += [f"https://{registry}", f"http://{registry}"]
    names += [HUB_KEY, f"index.{DOCKER_HUB}"] if registry == DOCKER_HUB else []
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
