"""Keeps the bridge's certificates in a Secret for all replicas, and their CA at the API server.

Missing certificates are made, and expiring ones renewed. With `own`, a folder that cert-manager or
another tool maintains (`tls.crt`, `tls.key`), they are only served.
"""

import base64
import logging
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.bus.runtime.clock import REAL, Clock
from virtbus.kubebridge.core.objects.unstructured import Object, items, part, text
from virtbus.kubebridge.core.runtime.controller import (
    API_SERVICE,
    MUTATING,
    SECRET,
    VALIDATING,
    Key,
    Kind,
)
from virtbus.kubebridge.edge.cluster import KubernetesApi, StatusError
from virtbus.kubebridge.edge.runtime.workqueue import Lane
from virtbus.kubebridge.edge.signing import KeyMaterial, renewed

SECRET_NAME = "virtbus-kubebridge-certificates"  # noqa: S105  the name of a Secret
SERVICE_NAME = "virtbus-kubebridge"
WEBHOOKS = "virtbus-kubebridge"
LOOK_S = 60.0
"""Time between checks. It delays a change by another replica or by cert-manager."""
RETRY_S = 5.0
API_SERVICES = ("v1.subresources.kubevirt.io", "v1alpha3.subresources.kubevirt.io")
_FILES = {"ca.crt": "ca_crt", "ca.key": "ca_key", "tls.crt": "tls_crt", "tls.key": "tls_key"}
_log = logging.getLogger(__name__)

Show = Callable[[Path, Path], None]
"""Serves a certificate (with its chain) and its key from now on. Raises ValueError or OSError."""


class Where(NamedTuple):
    """The bridge's namespace, and the folder of the certificates if another tool maintains them."""

    namespace: str
    own: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the host names by which API servers call the bridge's Service."""
        return tuple(f"{SERVICE_NAME}.{self.namespace}{end}" for end in (".svc", ""))


class Certificates:
    """Keeps the certificate that `show` serves valid and trusted."""

    def __init__(
        self, cluster: KubernetesApi, where: Where, show: Show, sources: Clock = REAL
    ) -> None:
        self._cluster = cluster
        self._where = where
        self._show = show
        self._sources = sources
        self._shown: tuple[bytes, bytes] | None = None
        self._files: list[int] = []

    @property
    def key(self) -> Key:
        """Return the key of the Secret."""
        return Key(SECRET, self._where.namespace, SECRET_NAME)

    def lane(self) -> Lane:
        """Return the lane of the work queue. All replicas serve, so all check."""
        return Lane(self.reconcile, workers=1, always=True)

    async def reconcile(self, _: Key) -> float:
        """Check the certificates. Return the seconds before the next check."""
        try:
            await self.ensure()
        except (StatusError, OSError, ValueError) as error:
            forbidden = isinstance(error, StatusError) and error.code == 403
            mend = "; apply deploy/kubernetes again, its roles changed" if forbidden else ""
            _log.warning("certificates: %s%s", error, mend, extra={"code": "certificates"})
            return RETRY_S
        return LOOK_S

    def close(self) -> None:
        """Close the files of the certificate. After that, nothing can be served."""
        _close(self._files)
        self._files = []

    async def ensure(self) -> None:
        """Make missing certificates, serve them, and publish their CA."""
        if self._where.own is not None:
            self._serve(*(self._where.own / name for name in ("tls.crt", "tls.key")))
            return
        kept = await self._kept()
        self._hold(kept.tls_crt.encode(), kept.tls_key.encode())
        bundle = base64.b64encode(kept.ca_crt.encode()).decode()
        for name in API_SERVICES:
            await self._tell_api_service(name, bundle)
        for kind in (MUTATING, VALIDATING):
            await self._tell_webhooks(kind, bundle)

    # --- the Secret -----------------------------------------------------------------------
    async def _kept(self) -> KeyMaterial:
        """Return the shared certificates. The first replica to write wins; others read it."""
        while True:
            secret = await self._cluster.get(SECRET, SECRET_NAME, self._where.namespace)
            kept = _read(secret)
            fresh = renewed(kept, self._where.names, self._now())
            if fresh == kept:
                return kept
            try:
                await self._write(secret, fresh)
            except StatusError as answer:
                if answer.code != 409:
                    raise
                _log.info("another replica made the certificates")
            else:
                _log.info("certificates renewed", extra={"code": "certificates"})

    async def _write(self, secret: dict[str, Any] | None, kept: KeyMaterial) -> None:
        data = {
            name: base64.b64encode(getattr(kept, field).encode()).decode()
            for name, field in _FILES.items()
        }
        if secret is not None:
            await self._cluster.replace(SECRET, secret | {"data": data})
            return
        metadata = {"name": SECRET_NAME, "namespace": self._where.namespace}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        await self._cluster.create(SECRET, body, self._where.namespace)

    def _now(self) -> datetime:
        return self._sources.now().replace(microsecond=0)  # certificates have whole seconds

    # --- serving --------------------------------------------------------------------------
    def _serve(self, certificate: Path, key: Path) -> None:
        found = certificate.read_bytes(), key.read_bytes()
        if found != self._shown:
            self._show(certificate, key)
            self._shown = found

    def _hold(self, certificate: bytes, key: bytes) -> None:
        """Serve from memory: the key is in no file, and a pod's root may be read-only."""
        if (certificate, key) == self._shown:
            return
        files = [_in_memory(name, data) for name, data in (("crt", certificate), ("key", key))]
        try:
            self._serve(*(Path(f"/proc/self/fd/{file}") for file in files))
        except BaseException:
            _close(files)
            raise
        _close(self._files)
        self._files = files

    # --- telling --------------------------------------------------------------------------
    async def _tell_api_service(self, name: str, bundle: str) -> None:
        service = await self._cluster.get(API_SERVICE, name)
        if service is None or text(service, "spec", "caBundle") == bundle:
            return
        await self._cluster.patch(API_SERVICE, name, {"spec": {"caBundle": bundle}})

    async def _tell_webhooks(self, kind: Kind, bundle: str) -> None:
        """Set the CA of each webhook, unless the list changed since it was read."""
        configured = await self._cluster.get(kind, WEBHOOKS)
        steps: list[dict[str, Any]] = []
        for index, webhook in enumerate(items(configured, "webhooks")):
            if text(webhook, "clientConfig", "caBundle") != bundle:
                at = f"/webhooks/{index}"
                steps += [
                    {"op": "test", "path": f"{at}/name", "value": text(webhook, "name")},
                    {"op": "add", "path": f"{at}/clientConfig/caBundle", "value": bundle},
                ]
        if steps:
            await self._cluster.patch(kind, WEBHOOKS, steps, how="json")


def _read(secret: Object | None) -> KeyMaterial:
    """Parse the Secret. Unreadable parts count as missing and are made again."""
    found = {}
    for name, field in _FILES.items():
        try:
            found[field] = base64.b64decode(text(part(secret, "data"), name)).decode()
        except ValueError:
            found[field] = ""
    return KeyMaterial(**found)


def _in_memory(name: str, data: bytes) -> int:
    file = os.memfd_create(f"virtbus-tls-{name}", os.MFD_CLOEXEC)
    os.write(file, data)
    return file


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
