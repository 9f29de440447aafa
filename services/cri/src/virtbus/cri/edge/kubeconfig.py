"""Reads a kubeconfig: the API server of the cluster, and the login of this node.

The file is read for each connection, so tokens and certificates may be renewed at any time.
virtbus-cri starts no programs, so it refuses a login by a program (`exec`, `auth-provider`). A
login by user name and password is refused, too.
"""

import base64
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.yaml_text import YamlError, read_yaml

MOST_BYTES, MOST_VALUES = 256 * 1024, 2000
_PROGRAMS = ("exec", "auth-provider", "username")


class Login(NamedTuple):
    """The URL of an API server, the settings of TLS, and the headers of each request."""

    server: str
    trust: ssl.SSLContext
    headers: dict[str, str]


def read_login(path: Path) -> Login:
    """Return the login of the current context. The call blocks while it reads files.

    Raises:
        VirtbusError: 400 `kubeconfig_invalid`, with the file and the field.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _invalid(path, f"is larger than {MOST_BYTES} bytes")
        whole = read_yaml(path.read_text(encoding="utf-8"), max_values=MOST_VALUES)
        return _login(path, whole)
    except (YamlError, OSError, ValueError, TypeError, AttributeError) as error:
        raise _invalid(path, f"cannot be used: {error}") from None


def _login(path: Path, whole: dict[str, Any]) -> Login:
    context = _named(path, whole, "context", str(whole.get("current-context", "")))
    cluster = _named(path, whole, "cluster", str(context.get("cluster", "")))
    user = _named(path, whole, "user", str(context.get("user", "")))
    program = next((key for key in _PROGRAMS if user.get(key)), None)
    if program:
        message = f"users: {program} is not supported; use a token or a client certificate"
        raise _invalid(path, message)
    if cluster.get("insecure-skip-tls-verify"):
        raise _invalid(path, "clusters: give certificate-authority; servers are always verified")
    server = str(cluster.get("server", ""))
    if not server.startswith(("https://", "http://")):
        raise _invalid(path, "clusters: server must be an URL")
    authority = _content(path, cluster, "certificate-authority")
    trust = ssl.create_default_context(cadata=authority.decode() if authority else None)
    _present_certificate(path, user, trust)
    token = str(user.get("token") or "")
    if not token and user.get("tokenFile"):
        token = (path.parent / str(user["tokenFile"])).read_text(encoding="utf-8").strip()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return Login(server.rstrip("/"), trust, headers)


def _named(path: Path, whole: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    for one in whole.get(f"{kind}s") or ():
        if one.get("name") == name:
            found: dict[str, Any] = one.get(kind) or {}
            return found
    raise _invalid(path, f"has no {kind} {name!r:.80}")


def _content(path: Path, fields: dict[str, Any], name: str) -> bytes:
    """Return the content of the field `<name>-data` (base64), or of the file in the field `name`.

    If both fields are missing, return empty bytes.
    """
    if data := fields.get(f"{name}-data"):
        return base64.b64decode(str(data), validate=True)
    return (path.parent / str(fields[name])).read_bytes() if fields.get(name) else b""


def _present_certificate(path: Path, user: dict[str, Any], trust: ssl.SSLContext) -> None:
    certificate = _content(path, user, "client-certificate")
    if certificate:
        key = _content(path, user, "client-key") or certificate
        with _file_of(certificate) as first, _file_of(key) as second:
            trust.load_cert_chain(first, second)


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Keep bytes in a temporary file, because OpenSSL loads keys only from files."""
    with tempfile.NamedTemporaryFile(prefix="virtbus-") as file:
        file.write(content)
        file.flush()
        yield file.name


def _invalid(path: Path, why: str) -> VirtbusError:
    return VirtbusError(Code.INVALID, "kubeconfig_invalid", f"{path} {why}")
