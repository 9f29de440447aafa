"""Translates the image names of pods to image references of virtbus.

- After the prefix `virtlet.cloud/`, the rest is an image name on the bus or in imaged's rules. A
  rest that begins with a host may also be the URL of a disk image without its scheme, as in
  Virtlet.
- A name that begins with a registry's host is a container image with a disk.
- Any other name is an image name on the bus or in imaged's rules.

kubelet adds `:latest` to each name without a tag. This tag is dropped, and only the name of a
container image keeps it.
"""

import json
import re
from typing import NamedTuple

from virtbus.cri.core.configs import AuthConfig
from virtbus.schemas.container import SCHEME, only_login, parse_locator
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import check_image_ref, parse_image_ref

PREFIX = "virtlet.cloud/"
_LATEST = ":latest"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageName(NamedTuple):
    """A pod's image name in two parts: the name, and the digest or an empty text."""

    name: str
    digest: str

    @property
    def plain(self) -> str:
        """Return the name without the tag `latest`, which kubelet adds."""
        return self.name.removesuffix(_LATEST)


def parse(text: str) -> ImageName:
    """Return the parts of `[name[:tag]][@sha256:<hex>]` or `sha256:<hex>`.

    Raises:
        VirtbusError: 400 `image_invalid`: the text is empty, or its digest is malformed.
    """
    if _DIGEST.fullmatch(text):
        return ImageName("", text)
    name, at, digest = text.partition("@")
    if not name or (at and _DIGEST.fullmatch(digest) is None):
        message = f"{text!r:.200} is no image; give a name, a name@sha256:DIGEST, or an id"
        raise VirtbusError(Code.INVALID, "image_invalid", message)
    return ImageName(name, digest)


def tagged(name: str) -> str:
    """Return the name, with the tag `latest` if it has no tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}{_LATEST}"


def candidates(image: ImageName, scheme: str = "https") -> tuple[str, ...]:
    """Return the references that the name may mean, in the order in which to try them.

    `scheme` completes the URL of a disk image whose name is a host and a path.

    Raises:
        VirtbusError: 400 `image_invalid`.
    """
    pin = f"@{image.digest}" if image.digest else ""
    if image.plain.startswith(PREFIX):
        rest = image.plain.removeprefix(PREFIX)
        found = [rest, f"{scheme}://{rest}"] if _begins_with_host(rest) else [rest]
    elif _begins_with_host(image.plain):
        found = [f"{SCHEME}{image.name}"]
    else:
        found = [image.plain]
    try:
        return tuple(check_image_ref(f"{ref}{pin}") for ref in found)
    except ValueError as error:
        message = f"the image {image.name!r:.200} {error}"
        raise VirtbusError(Code.INVALID, "image_invalid", message) from None


def pinned(ref: str, digest: str) -> str:
    """Return the reference with `digest`, the digest of the image's file.

    A reference to a container image is returned unchanged.
    """
    source = parse_image_ref(ref)
    return ref if source.is_container else source._replace(digest=digest).ref


def login(ref: str, auth: AuthConfig) -> str | None:
    """Return the login for a container image as the text of a Docker `config.json`.

    Return None if `auth` is empty, or if the image is no container image.

    Raises:
        VirtbusError: 400 `login_invalid`: the login is malformed. 422 `login_unsupported`: the
            login is a token. The messages contain no part of the login.
    """
    source = parse_image_ref(ref)
    if not source.is_container:
        return None
    image = parse_locator(source.locator, pinned=True)
    if auth.auth or auth.username or auth.password:
        entry = {"username": auth.username, "password": auth.password}
        entry |= {"auth": auth.auth} if auth.auth else {}
        try:
            return only_login(image, json.dumps({"auths": {image.registry: entry}}))
        except ValueError as error:
            message = f"the login of the imagePullSecrets for {ref} is not usable: {error}"
            raise VirtbusError(Code.INVALID, "login_invalid", message) from None
    if auth.identity_token or auth.registry_token:
        message = (
            f"the login of the imagePullSecrets for {ref} is a token; use a user's name and "
            "password, or an access token in place of the password"
        )
        raise VirtbusError(Code.UNSUPPORTED, "login_unsupported", message)
    return None


def _begins_with_host(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")
