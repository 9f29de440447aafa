"""Reads conflists, and runs the plugins in them, bounded in time and output (NET-10)."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from virtbus.netd.core import cni
from virtbus.netd.core.attachment import CniState, Nic
from virtbus.netd.core.cni_verbs import (
    CniPlace,
    CniVerb,
    bare_input,
    checked_plugins,
    has_verb,
)
from virtbus.netd.core.libcni_cache import cached_result
from virtbus.netd.core.tenancy import Openings, check_open
from virtbus.netd.edge.cni_cache import CniCache
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.plugin_process import PluginProcess
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.network_object import NetworkTarget

log = logging.getLogger(__name__)

PLUGIN_TIMEOUT_S = 30.0
_SUFFIXES = (".conflist", ".conf", ".json")
_MAX_CONF_BYTES = 256 * 1024


class Cni:
    """Reads conflists by name from one directory, and runs plugins from several directories."""

    def __init__(
        self,
        conf_dir: Path,
        bin_dirs: Sequence[Path],
        cache: CniCache,
        *,
        plugin_timeout_s: float = PLUGIN_TIMEOUT_S,
        openings: Openings = MappingProxyType({}),
        allowed: Collection[str] = (),
    ) -> None:
        """`openings` has, by network, the namespaces of VMs that may use it. Others are refused.

        `allowed` are the plugins that a conflist in a network object may name.
        """
        self.openings = openings
        self.allowed = frozenset(allowed)
        self._conf_dir = conf_dir
        self._bin_dirs = tuple(bin_dirs)
        self._timeout_s = plugin_timeout_s
        self.cache = cache
        self._adding: set[CniPlace] = set()
        self._collecting = asyncio.Lock()

    def networks(self) -> dict[str, Path]:
        """Return the file of each network name. Of two files with one name, the first is used."""
        found: dict[str, Path] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(self._conf_dir.iterdir()):
                if path.suffix in _SUFFIXES:
                    with contextlib.suppress(VirtbusError):
                        found.setdefault(self._read(path).conflist["name"], path)
        return found

    def load(self, network: str, namespace: str) -> CniState:
        """Return the conflist called `network`, for a VM of `namespace`.

        Raises:
            VirtbusError: 403 `network_closed`: the namespace may not use the network. 404
                `network_unknown`: no conflist has this name; the message has the existing names.
                422 `cni_config` instead of 404: a file of that name, such as `10-lan.conf` for
                `lan`, is invalid.
        """
        broken: VirtbusError | None = None
        known: list[str] = []
        paths = sorted(self._conf_dir.iterdir()) if self._conf_dir.is_dir() else []
        for path in paths:
            if path.suffix not in _SUFFIXES:
                continue
            try:
                state = self._read(path)
            except VirtbusError as error:
                broken = error if f"-{path.stem}".endswith(f"-{network}") else broken
                continue
            if state.conflist["name"] == network:
                check_open(network, namespace, self.openings)
                return state
            known.append(state.conflist["name"])
        if broken is not None:
            raise broken
        raise VirtbusError(
            Code.NOT_FOUND,
            "network_unknown",
            f"no network '{network}' on this node; known: default"
            f"{''.join(f', {name}' for name in known)}; add a conflist to {self._conf_dir}",
        )

    def of_target(self, target: NetworkTarget) -> CniState:
        """Return the conflist in a network object. Its name on the host contains the object's uid.

        Raises:
            VirtbusError: 403 `plugin_forbidden`: a plugin is not on the node's allow-list. 422
                `cni_config`: the conflist is not valid.
        """
        return cni.conflist_of(target, self.allowed)

    def _read(self, path: Path) -> CniState:
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_CONF_BYTES)
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror}; correct or remove it"
            raise VirtbusError(Code.UNSUPPORTED, "cni_config", message) from error
        return cni.read_conflist(content, str(path))

    async def add(self, uid: str, nic: Nic, state: CniState, netns: Path) -> CniState:
        """Run ADD of all plugins in order. Return the state that DEL needs, with the last result.

        Raises:
            VirtbusError: 503 `cni_not_ready`: a plugin says on STATUS that it is not ready. 500
                `cni_failed`: a plugin failed; the message has its reason. 500 `cni_result`: a
                plugin printed no result. 422 `cni_plugin_missing`: a plugin is not installed.
                After an error, `delete` must be run.
        """
        conflist = state.conflist
        place = CniPlace(conflist["name"], uid, nic.eth)
        self._adding.add(place)
        try:
            async with self._collecting:
                pass  # wait for a collection that began earlier: it would remove this attachment
            await self._status(conflist)
            result = await self._add(uid, nic, conflist, netns)
        finally:
            self._adding.discard(place)
        words = cni.arguments(nic), cni.runtime_values(conflist, nic)
        source = state.source or json.dumps(conflist)
        told = {"cniVersion": conflist["cniVersion"], **(result or {})}
        content = cached_result(place, str(netns), source, words, told)
        self.cache.write(place, content)
        return CniState(conflist=conflist, result=result)

    async def _add(
        self, uid: str, nic: Nic, conflist: dict[str, Any], netns: Path
    ) -> dict[str, Any] | None:
        result: dict[str, Any] | None = None
        for plugin in conflist["plugins"]:
            given = cni.plugin_input(conflist, plugin, nic, result)
            output = await self._run(
                "ADD", plugin["type"], given, self._env("ADD", uid, nic, netns)
            )
            result = cni.read_result(output, plugin["type"])
        return result

    async def _status(self, conflist: dict[str, Any]) -> None:
        """Check by STATUS, if the plugins know it, that they can take an interface now.

        Raises:
            VirtbusError: 503 `cni_not_ready`.
        """
        if not has_verb(conflist, CniVerb.STATUS):
            return
        environment = cni.bare_environment(CniVerb.STATUS, self._path)
        for plugin in conflist["plugins"]:
            given = bare_input(conflist, plugin)
            await self._run(CniVerb.STATUS, plugin["type"], given, environment, failed=_not_ready)

    async def check(self, uid: str, nic: Nic, state: CniState, netns: Path) -> list[str]:
        found: list[str] = []
        if state.result is None or not has_verb(state.conflist, CniVerb.CHECK):
            return found
        environment = self._env(CniVerb.CHECK, uid, nic, netns)
        for plugin in checked_plugins(state.conflist):
            given = cni.plugin_input(state.conflist, plugin, nic, state.result)
            try:
                await self._run(CniVerb.CHECK, plugin["type"], given, environment, failed=_misses)
            except VirtbusError as error:
                found.append(str(error))
        return found

    async def collect(
        self, conflist: dict[str, Any], known: Callable[[], Iterable[CniPlace]]
    ) -> None:
        """Let plugins that know GC remove everything that belongs to no interface of `known`.

        The failure of a plugin is only logged. Interfaces that `add` is making are kept, too.
        `known` is called while new runs of `add` wait. An earlier list could lack an interface that
        was made while another conflist was collected.
        """
        if not has_verb(conflist, CniVerb.GC):
            return
        async with self._collecting:
            name = conflist["name"]
            kept = {one for one in (*known(), *self._adding) if one.network == name}
            environment = cni.bare_environment(CniVerb.GC, self._path)
            for plugin in conflist["plugins"]:
                given = bare_input(conflist, plugin, kept)
                try:
                    await self._run(CniVerb.GC, plugin["type"], given, environment)
                except VirtbusError as error:
                    extra = {"code": "cni_gc_failed"}
                    log.warning("leftovers of plugins may stay: %s", error, extra=extra)

    async def delete(self, uid: str, nic: Nic, state: CniState, netns: Path) -> None:
        """Run DEL of every plugin in reverse order, with the stored conflist and result.

        A plugin that is not installed any more is skipped.

        Raises:
            VirtbusError: 500 `cni_failed` of the first plugin that failed. All others were run.
        """
        first: VirtbusError | None = None
        for plugin in reversed(state.conflist["plugins"]):
            given = cni.plugin_input(state.conflist, plugin, nic, state.result)
            try:
                environment = self._env("DEL", uid, nic, netns)
                await self._run("DEL", plugin["type"], given, environment, failed=_not_undone)
            except VirtbusError as error:
                if error.reason == "cni_plugin_missing":
                    extra = {"code": "cni_plugin_missing", "uid": uid}
                    log.warning("cannot undo %s: %s", plugin["type"], error, extra=extra)
                    continue
                first = first or error
        if first is not None:
            raise first
        self.cache.remove(CniPlace(state.conflist["name"], uid, nic.eth))

    @property
    def _path(self) -> str:
        return os.pathsep.join(str(each) for each in self._bin_dirs)

    def _env(self, command: str, uid: str, nic: Nic, netns: Path) -> dict[str, str]:
        return cni.environment(command, uid, nic, str(netns), self._path)

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

    async def _run(
        self,
        command: str,
        plugin: str,
        given: bytes,
        env: dict[str, str],
        *,
        failed: Callable[[str, str, str], VirtbusError] | None = None,
    ) -> bytes:
        error_of = failed or _failed
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
            raise error_of(command, plugin, str(error)) from error
        if outcome.fault:
            raise error_of(command, plugin, outcome.fault)
        if outcome.code != 0:
            raise error_of(command, plugin, cni.failure_text(outcome.output, outcome.errors))
        return outcome.output


def _failed(command: str, plugin: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.INTERNAL,
        "cni_failed",
        f"CNI plugin {plugin} failed on {command}: {why}; fix the network, create the VM again",
    )


def _not_undone(_command: str, plugin: str, why: str) -> VirtbusError:
    message = (
        f"CNI plugin {plugin} failed on DEL: {why}; it is run again. Repair it, or give up what it "
        "made: virtbus vm delete --force"
    )
    return VirtbusError(Code.INTERNAL, "cni_failed", message)


def _not_ready(_command: str, plugin: str, why: str) -> VirtbusError:
    message = f"CNI plugin {plugin} is not ready: {why}; netd asks it again"
    return VirtbusError(
        Code.UNAVAILABLE, "cni_not_ready", message, retry=Retry.LATER, after_ms=5000
    )


def _misses(_command: str, plugin: str, why: str) -> VirtbusError:
    message = f"CNI plugin {plugin} misses a part of what it made: {why}"
    return VirtbusError(Code.INTERNAL, "cni_check", message)
