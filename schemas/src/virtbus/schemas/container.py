"""Parses references to container images, and defines a disk from an image (containerDisk).

References have the grammar of the distribution project's `reference` package, with Docker's short
names: `fedora` is `docker.io/library/fedora:latest`.
"""

import re
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, StringConstraints, ValidationInfo, field_validator

from virtbus.schemas.model import StrictModel
from virtbus.schemas.registry_login import DOCKER_HUB, SECRET_BYTES, login_for

SCHEME = "docker://"
"""The scheme that skopeo, podman and KubeVirt's importer use for an image in a registry."""
_LATEST = "latest"
_WORD = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9-]+"
_REFERENCE = (
    rf"(?:(?P<registry>(?:localhost|(?:{_HOST}\.)+{_HOST}|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?"
    rf"|{_HOST}:[0-9]{{1,5}})/)?"
    rf"(?P<repository>{_WORD}(?:/{_WORD})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
_DIGEST = r"sha256:[0-9a-f]{64}"
_PATH = r"(?:/(?!\.{1,2}(?:/|$))[^/@#?\x00-\x20\x7f]{1,255}){1,16}"
_MAX_REPOSITORY = 255


class ContainerRef(NamedTuple):
    """A parsed reference.

    `tag` is empty if only a digest was given. `path` is the disk file in the image; an empty `path`
    means the only file in /disk.
    """

    registry: str
    repository: str
    tag: str
    path: str

    @property
    def locator(self) -> str:
        """Return `docker://registry/repository[:tag][#path]`, which `parse_locator` parses."""
        tag = f":{self.tag}" if self.tag else ""
        path = f"#{self.path}" if self.path else ""
        return f"{SCHEME}{self.image}{tag}{path}"

    @property
    def image(self) -> str:
        return f"{self.registry}/{self.repository}"


def parse_locator(text: str, *, pinned: bool) -> ContainerRef:
    """Parse `docker://[registry/]repository[:tag][#path]`; the default registry is docker.io.

    The default tag is `latest`. If `pinned`, a digest is given separately, and the tag has no
    default.

    Raises:
        ValueError: the text is not such a reference.
    """
    name, hash_mark, path = text.removeprefix(SCHEME).partition("#")
    match = re.fullmatch(_REFERENCE, name)
    if match is None or len(match["repository"]) > _MAX_REPOSITORY:
        msg = (
            "must be a container image such as quay.io/containerdisks/fedora:40, its repository in "
            "small letters"
        )
        raise ValueError(msg)
    if hash_mark:
        check_path(path)
    registry = (match["registry"] or DOCKER_HUB).lower()
    registry = DOCKER_HUB if registry == f"index.{DOCKER_HUB}" else registry
    repository = match["repository"]
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    tag = match["tag"] or ("" if pinned else _LATEST)
    return ContainerRef(registry, repository, tag, path)


def check_path(text: str) -> str:
    """Return `text` if it is the absolute path of a file, or raise ValueError (IMG-25)."""
    if re.fullmatch(_PATH, text) is None:
        msg = (
            "must be the absolute path of a file in the image, such as /disk/fedora.qcow2, "
            "without '.', '..', spaces, '@', '#' and '?'"
        )
        raise ValueError(msg)
    return text


def _split(image: str) -> tuple[ContainerRef, str]:
    """Split `[registry/]repository[:tag][@digest]` into its reference and its digest or ""."""
    name, _, digest = image.partition("@")
    if "#" in name or ((digest or "@" in image) and re.fullmatch(_DIGEST, digest) is None):
        msg = "must be a container image, may end in @sha256: and 64 lower-case hex digits"
        raise ValueError(msg)
    return parse_locator(SCHEME + name, pinned=bool(digest)), digest


def check_image(text: str) -> str:
    """Return `text` if it names a container image, or raise ValueError."""
    if "://" in text:
        msg = "must be a container image without a scheme, such as quay.io/containerdisks/fedora:40"
        raise ValueError(msg)
    _split(text)
    return text


class ImagePullPolicy(StrEnum):
    """The rule for contacting the registry before a disk is made (as in Kubernetes)."""

    ALWAYS = "Always"
    """Resolve the tag for each new disk; an unchanged image is not transferred again."""
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"
    """The image must have been pulled before."""


def only_login(ref: ContainerRef, text: str) -> str:
    """Return a `config.json` with the login in `text` for an image, and with no other login.

    Raises:
        ValueError: `text` has no login for the image, or is invalid. The error does not quote
            `text`.
    """
    login = login_for(ref.image, text.encode())
    if login is None:
        msg = f"holds no login for {ref.registry}; `docker login {ref.registry}` writes one"
        raise ValueError(msg)
    return login.config(ref.registry)


class ContainerDisk(StrictModel):
    """A private overlay of the disk file in a container image (KubeVirt's containerDisk).

    `path` is the disk file; default: the only file in the image's /disk. The guest's writes are
    private and are deleted with the VM. The default of `image_pull_policy` is Always for the tag
    latest, otherwise IfNotPresent. `image_pull_secret` is a `config.json` as written by `docker
    login`. Only its login for this image is used, in place of the node's login. A record shows the
    secret as an empty text.
    """

    image: Annotated[str, StringConstraints(max_length=1024), AfterValidator(check_image)]
    path: Annotated[str, StringConstraints(max_length=512), AfterValidator(check_path)] | None = (
        None
    )
    image_pull_policy: ImagePullPolicy | None = None
    image_pull_secret: Annotated[str, StringConstraints(max_length=SECRET_BYTES)] | None = None

    @field_validator("image_pull_secret")
    @classmethod
    def _only_its_login(cls, text: str | None, info: ValidationInfo) -> str | None:
        image = info.data.get("image")
        return text if not text or image is None else only_login(_split(image)[0], text)

    def without_secrets(self) -> "ContainerDisk":
        """Return the disk for a record: a secret that is set becomes an empty text."""
        secret = None if self.image_pull_secret is None else ""
        return self.model_copy(update={"image_pull_secret": secret})

    @property
    def ref(self) -> str:
        """Return the image reference, `docker://…`, as image stores list it."""
        ref, digest = _split(self.image)
        locator = ref._replace(path=self.path or "").locator
        return f"{locator}@{digest}" if digest else locator

    @property
    def pull_policy(self) -> ImagePullPolicy:
        """Return `image_pull_policy`, or Kubernetes' default if it is unset."""
        if self.image_pull_policy is not None:
            return self.image_pull_policy
        latest = _split(self.image)[0].tag == _LATEST
        return ImagePullPolicy.ALWAYS if latest else ImagePullPolicy.IF_NOT_PRESENT
