"""Authenticates users by the headers of the API server, which acts as a front proxy.

The configuration of the front proxy is in the ConfigMap
`kube-system/extension-apiserver-authentication`, which the API server maintains (Kubernetes'
"Configure the aggregation layer").
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from virtbus.kubebridge.core.objects.unstructured import Object, text

NAMESPACE, NAME = "kube-system", "extension-apiserver-authentication"


class User(NamedTuple):
    """The user of a request, as the API server has authenticated the user."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class FrontProxy(NamedTuple):
    """The front proxy, whose certificate is signed by `ca` (PEM) and has a name in `names`.

    If `names` is empty, any certificate that `ca` signed is accepted. Without `ca`, no certificate
    is accepted.
    """

    ca: str = ""
    names: tuple[str, ...] = ()
    user_headers: tuple[str, ...] = ("X-Remote-User",)
    group_headers: tuple[str, ...] = ("X-Remote-Group",)
    uid_headers: tuple[str, ...] = ("X-Remote-Uid",)
    extra_prefixes: tuple[str, ...] = ("X-Remote-Extra-",)

    def is_it(self, certificate: Mapping[str, Any] | None) -> bool:
        """Return True if a client's verified certificate (from `ssl`) is the front proxy's."""
        if not self.ca or not certificate:
            return False
        named = {
            value
            for part in certificate.get("subject", ())
            for key, value in part
            if key == "commonName"
        }
        return not self.names or not named.isdisjoint(self.names)

    def user(self, headers: Sequence[tuple[str, str]]) -> User | None:
        name = next(iter(_values(headers, self.user_headers)), "")
        if not name:
            return None
        groups = tuple(_values(headers, self.group_headers))
        uid = next(iter(_values(headers, self.uid_headers)), "")
        found: dict[str, list[str]] = {}
        for prefix in self.extra_prefixes:
            for header, value in headers:
                if header.lower().startswith(prefix.lower()):
                    key = unquote(header[len(prefix) :].lower())
                    found.setdefault(key, []).append(value)
        extra = tuple((key, tuple(values)) for key, values in sorted(found.items()))
        return User(name, groups, uid, extra)


def _values(headers: Sequence[tuple[str, str]], names: Iterable[str]) -> list[str]:
    for name in names:
        if found := [value for key, value in headers if key.lower() == name.lower()]:
            return found
    return []


def of_config_map(found: Object | None) -> FrontProxy:
    """Return the front proxy that the ConfigMap describes.

    A missing or invalid list of headers gets its default. Without the ConfigMap, or if the list of
    allowed names is invalid, no certificate is accepted.
    """
    usual = FrontProxy()
    names = _listed(found, "allowed-names")
    if found is None or names is None:
        return usual
    return FrontProxy(
        ca=text(found, "data", "requestheader-client-ca-file"),
        names=names,
        user_headers=_listed(found, "username-headers") or usual.user_headers,
        group_headers=_listed(found, "group-headers") or usual.group_headers,
        uid_headers=_listed(found, "uid-headers") or usual.uid_headers,
        extra_prefixes=_listed(found, "extra-headers-prefix") or usual.extra_prefixes,
    )


def _listed(found: Object | None, name: str) -> tuple[str, ...] | None:
    """Return a JSON list of strings: empty if it is missing, None if it is invalid."""
    listed_text = text(found, "data", f"requestheader-{name}")
    if not listed_text:
        return ()
    try:
        listed = json.loads(listed_text)
    except ValueError:
        return None
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        return None
    return tuple(listed)
