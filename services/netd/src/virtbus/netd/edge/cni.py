"""Runs CNI plugins: chains of ADD and DEL, bounded in time and output (NET-10)."""

import contextlib
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from virtbus.netd.core import cni
from virtbus.netd.core.attachment import CniState, Nic
from virtbus.netd.core.tenancy import Openings, check_open
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.plugin_process import PluginProcess
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network_object import NetworkTarget

log = logging.getLogger(__name__)

PLUGIN_TIMEOUT_S = 30.0
_SUFFIXES = (".conflist", ".conf", ".json")
_MAX_CONF_BYTES = 256 * 1024


class Cni:
    """Reads conflists by name from one directory, and runs plugins by name from several."""

    def __init__(
        self,
        conf_dir: Path,
        bin_dirs: Sequence[Path],
        *,
        plugin_timeout_s: float = PLUGIN_TIMEOUT_S,
        openings: Openings = MappingProxyType({}),
        allowed: Collection[str] = (),
    ) -> None:
        """`openings` has the namespaces that may use each network; all others are refused.

        `allowed` are the plugins that a conflist in a network object may name.
        """
        self.openings = openings
        self.allowed = frozenset(allowed)
        self._conf_dir = conf_dir
        self._bin_dirs = tuple(bin_dirs)
        self._timeout_s = plugin_timeout_s

    def networks(self) -> dict[str, Path]:
        """Return the file of each network name. Of two files with one name, the first counts."""
        found: dict[str, Path] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(self._conf_dir.iterdir()):
                if path.suffix in _SUFFIXES:
                    with contextlib.suppress(VirtbusError, OSError):
                        found.setdefault(self._read(path)["name"], path)
        return found

    def load(self, network: str, namespace: str) -> dict[str, Any]:
        """Return the conflist called `network`, for a VM of `namespace`.

        Raises:
            VirtbusError: 403 `network_closed`; 404 `network_unknown` with the existing names, or
                the reason why a file of that name cannot be used (422).
        """
        broken: VirtbusError | None = None
        known: list[str] = []
        paths = sorted(self._conf_dir.iterdir()) if self._conf_dir.is_dir() else []
        for path in paths:
            if path.suffix not in _SUFFIXES:
                continue
            try:
                conf = self._read(path)
            except VirtbusError as error:
                broken = error if network in path.stem else broken
                continue
            if conf["name"] == network:
                check_open(network, namespace, self.openings)
                return conf
            known.append(conf["name"])
        if broken is not None:
            raise broken
        raise VirtbusError(
            Code.NOT_FOUND,
            "network_unknown",
            f"no network '{network}' on this node; known: default"
            f"{''.join(f', {name}' for name in known)}; add a conflist to {self._conf_dir}",
        )

    def of_target(self, target: NetworkTarget) -> dict[str, Any]:
        """Return the conflist in a network object; its name on the host is the object's uid.

        Raises:
            VirtbusError: 403 `plugin_forbidden` for a plugin that is not on the node's allow-list;
                422 `cni_config`.
        """
        return cni.conflist_of(target, self.allowed)

    def _read(self, path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            return cni.read_conflist(file.read(_MAX_CONF_BYTES), str(path))

    async def add(self, uid: str, nic: Nic, conflist: dict[str, Any], netns: Path) -> CniState:
        """Run ADD through the chain; return the state that DEL needs, with the last result.

        Raises:
            VirtbusError: 500 `cni_failed` with the plugin's message; then `delete` must be run.
        """
        result: dict[str, Any] | None = None
        for plugin in conflist["plugins"]:
            given = cni.plugin_input(conflist, plugin, nic, result)
            output = await self._run(
                "ADD", plugin["type"], given, self._env("ADD", uid, nic, netns)
            )
            result = cni.read_result(output, plugin["type"])
        return CniState(conflist=conflist, result=result)

    async def delete(self, uid: str, nic: Nic, state: CniState, netns: Path) -> None:
        """Run DEL of every plugin in reverse order, with the stored conflist and result.

        A plugin that is not installed any more is skipped.

        Raises:
            VirtbusError: 500 `cni_failed` of the first plugin that failed; the others were run.
        """
        first: VirtbusError | None = None
        for plugin in reversed(state.conflist["plugins"]):
            given = cni.plugin_input(state.conflist, plugin, nic, state.result)
            try:
                await self._run("DEL", plugin["type"], given, self._env("DEL", uid, nic, netns))
            except VirtbusError as error:
                if error.reason == "cni_plugin_missing":
                    extra = {"code": "cni_plugin_missing", "uid": uid}
                    log.warning("cannot undo %s: %s", plugin["type"], error, extra=extra)
                    continue
                first = first or error
        if first is not None:
            raise first

    def _env(self, command: str, uid: str, nic: Nic, netns: Path) -> dict[str, str]:
        path = os.pathsep.join(str(each) for each in self._bin_dirs)
        return cni.environment(command, uid, nic, str(netns), path)

    def _find(self, plugin: str) -> str:
        for directory in self._bin_dirs:
            candidate = directory / plugin
            if os.access(candidate, os.X_OK):
                return str(candidate)
        places = ", ".join(str(each) for each in self._bin_dirs)
        raise VirtbusError(
            Code.UNSUPPORTED,
            "cni_plugin_missing",
            f"no CNI plugin '{plugin}' in {places}; install containernetworking-plugins",
        )

    async def _run(self, command: str, plugin: str, given: bytes, env: dict[str, str]) -> bytes:
        process = PluginProcess(
            self._find(plugin),
            env,
            given,
            timeout_s=self._timeout_s,
            max_bytes=cni.MAX_OUTPUT_BYTES,
        )
        try:
            outcome = await in_thread(process.run, on_cancel=process.kill)
        except OSError as error:
            raise _failed(command, plugin, str(error)) from error
        if outcome.fault:
            raise _failed(command, plugin, outcome.fault)
        if outcome.code != 0:
            raise _failed(command, plugin, cni.failure_text(outcome.output, outcome.errors))
        return outcome.output


def _failed(command: str, plugin: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.INTERNAL,
        "cni_failed",
        f"CNI plugin {plugin} failed on {command}: {why}; fix the network, create the VM again",
    )
