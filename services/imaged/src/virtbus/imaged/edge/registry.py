"""Fetches manifests and small blobs from OCI registries, with logins."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import aiohttp

from virtbus.imaged.core import challenges
from virtbus.imaged.core.challenges import Challenge
from virtbus.imaged.core.sources import redirect_target, shown
from virtbus.imaged.edge.http import Http
from virtbus.imaged.edge.image_server import ImageServer
from virtbus.imaged.edge.transient import AgainError
from virtbus.schemas.container import ContainerRef
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.registry_login import DOCKER_HUB, Login


class Document(NamedTuple):
    """A manifest, index or configuration from the registry."""

    body: bytes
    content_type: str
    digest: str


class Registry(ImageServer):
    """One repository of one registry, for one transfer.

    `login_from` names the source of `login` in errors. `realms` has, for a registry, the host of
    the token server that may get the registry's password.
    """

    def __init__(
        self,
        http: Http,
        ref: ContainerRef,
        *,
        insecure: bool,
        login: Login | None,
        login_from: str,
        realms: Mapping[str, str],
    ) -> None:
        super().__init__(ref.locator)
        self._http = http
        self._ref = ref
        self._login = login
        self._login_from = login_from
        self._realms = realms
        self._authorization = ""
        self._unproved = False
        """True after a login, until the registry has accepted it."""
        host = challenges.HUB_HOST if ref.registry == DOCKER_HUB else ref.registry
        if not insecure:
            self.next_step = (
                f"check the registry {ref.registry} and this node's network; a registry "
                "without TLS must be in the setting insecure_registries, the network of a private, "
                "link-local or loopback address in image_addresses; imaged's log says more"
            )
        self.base = f"{'http' if insecure else 'https'}://{host}"

    @property
    def url(self) -> str:
        return self.base

    def url_of(self, kind: str, name: str) -> str:
        return f"{self.base}/v2/{self._ref.repository}/{kind}/{name}"

    def headers(self) -> dict[str, str]:
        return {"Authorization": self._authorization} if self._authorization else {}

    def accepted(self) -> None:
        """Record that the login works. After this, a 401 leads to another login."""
        self._unproved = False

    async def document(self, kind: str, name: str, accept: str, max_bytes: int) -> Document:
        """Return a manifest or small blob, verified if `name` is a digest.

        Raises:
            VirtbusError: 403 `image_denied`, `registry_realm_unknown`. 404 `image_not_found`. 422
                `manifest_invalid`, `image_source_refused`, `content_encoding`. 503
                `image_unreachable`. The errors of `Http.get`.
        """

        async def attempt() -> Document:
            headers = self.headers() | {"Accept": accept}
            async with self._http.get(self, self.url_of(kind, name), headers) as response:
                if response.status != 200:
                    await self.refuse(response)
                self.accepted()
                self.check_encoding(response)
                body = await self._read(response, max_bytes)
                if len(body) > max_bytes:
                    raise self._wrong(f"a {kind.removesuffix('s')} of more than {max_bytes} bytes")
                digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
                if name.startswith("sha256:") and digest != name:
                    raise self._wrong(f"bytes with {digest} for {name}")
                return Document(body, response.headers.get("Content-Type", ""), digest)

        return await self._http.insist(self, attempt)

    def _wrong(self, what: str) -> VirtbusError:
        return VirtbusError(
            Code.UNSUPPORTED,
            "manifest_invalid",
            f"the registry of {shown(self.what)} answers with {what}; "
            "push the image again, or use another registry",
        )

    async def refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        """Raise as `ImageServer.refuse`.

        After a 401, first log in and raise AgainError, so that the request is repeated. A second
        401 before the registry has accepted the login is an error.
        """
        if response.status == 401 and not self._unproved:
            challenge = challenges.challenge_of(response.headers.getall("WWW-Authenticate", ()))
            self._authorization = await self._authorize(challenge) if challenge else ""
            if self._authorization:
                self._unproved = True
                raise AgainError
        if response.status in {401, 403}:
            raise self._denied()
        if response.status in {404, 410}:
            raise self._absent()
        await super().refuse(response)

    async def _authorize(self, challenge: Challenge) -> str:
        if not challenge.realm:
            return self._login.header if self._login is not None else ""
        realm = redirect_target(self.base, self.base, challenge.realm)
        headers = {"Accept": "application/json"}
        if self._login is not None:
            if not challenges.may_get_login(self._ref.registry, self.base, realm, self._realms):
                raise self._realm_unknown(realm)
            headers["Authorization"] = self._login.header
        url = challenges.token_url(challenge._replace(realm=realm), self._ref)
        async with self._http.get(self, url, headers) as response:
            if response.status in {400, 401, 403, 404}:
                raise self._denied()
            if response.status != 200:
                await super().refuse(response)
            token = challenges.token_of(await self._read(response, challenges.MAX_TOKEN))
        if not token:
            raise self._wrong("no token at its token server")
        return f"Bearer {token}"

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """Return the body, cut off after `max_bytes` + 1 bytes (SRC-08).

        Raises TimeoutError after `rate_window_s`.
        """
        body = bytearray()
        async with asyncio.timeout(self._http.limits.rate_window_s):
            while len(body) <= max_bytes and (data := await response.content.readany()):
                body += data
        return bytes(body[: max_bytes + 1])

    # --- refusals ------------------------------------------------------------------------
    def _denied(self) -> VirtbusError:
        if self._login is None:
            step = (
                "check its name, because a registry also denies what it does not have; if it is "
                f"private, put a login for {self._ref.registry} into the node's "
                "registry-auth.json (setting registry_auth_file), or give the disk an "
                "image_pull_secret"
            )
        else:
            step = (
                f"the login of user {self._login.user} for {self._ref.registry} in "
                f"{self._login_from} is not accepted, or may not pull it: correct it there, or "
                "ask for the right to pull"
            )
        return VirtbusError(
            Code.DENIED, "image_denied", f"the registry denies {shown(self.what)}; {step}"
        )

    def _absent(self) -> VirtbusError:
        return VirtbusError(
            Code.NOT_FOUND,
            "image_not_found",
            f"the registry {self._ref.registry} has no {shown(self.what)}; check repository and "
            "tag, or push the image",
        )

    def _realm_unknown(self, realm: str) -> VirtbusError:
        host = realm.partition("//")[2].partition("/")[0]
        return VirtbusError(
            Code.DENIED,
            "registry_realm_unknown",
            f"the registry {self._ref.registry} asks for its password to be sent to {host}, "
            f"which no setting allows; if that is right, set registry_realms to "
            f'{{"{self._ref.registry}" = "{host}"}}',
        )
