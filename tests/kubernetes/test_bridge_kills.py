"""`kill -9` of the bridge, the API server, etcd and NATS in turn, during creates and deletes."""

import json
import threading
import time
from collections.abc import Callable

import pytest
from tests.kubernetes.platform import Platform, run, until
from tests.kubernetes.test_bridge import vm

pytestmark = [pytest.mark.kubernetes]

AWAY_S = 1.0


def _bridge(platform: Platform) -> None:
    run(platform.bridge.killed_and_ready())


def _apiserver(platform: Platform) -> None:
    platform.cluster.apiserver.kill()
    time.sleep(AWAY_S)
    platform.cluster.apiserver.start()
    _ready(platform)


def _etcd(platform: Platform) -> None:
    platform.cluster.etcd.kill()
    time.sleep(AWAY_S)
    platform.cluster.etcd.start()
    _ready(platform)


def _nats(platform: Platform) -> None:
    platform.nats.kill()
    time.sleep(AWAY_S)
    platform.nats.start()
    run(platform.bus_ready())


def _ready(platform: Platform) -> None:
    """The controllers end by themselves if the API server was down for long."""
    if platform.cluster.controllers.ended():
        platform.cluster.controllers.start()
    platform.cluster.wait_ready()


def _stubborn(platform: Platform, *argv: str, stdin: str | None = None) -> None:
    """Repeat failed requests, as a user would."""

    def done() -> bool:
        return platform.cluster.try_kubectl(*argv, stdin=stdin).returncode == 0

    until(f"kubectl {argv[0]} went through", done, timeout_s=200)


def _play(platform: Platform, ns: str, count: int, *kills: Callable[[Platform], None]) -> None:
    """Create `count` VMs and delete as many, while each part is killed once."""
    old, new = ([f"{word}-{number}" for number in range(count)] for word in ("old", "new"))
    platform.apply(ns, *map(vm, old))
    until("the old ones run", lambda: _running(platform, ns) == set(old), timeout_s=200)
    pace_s = AWAY_S * 6 / count

    def come() -> None:
        for name in new:
            manifest = json.dumps(vm(name))
            _stubborn(platform, "apply", "-n", ns, "-f", "-", stdin=manifest)
            time.sleep(pace_s)

    def go() -> None:
        for name in old:
            _stubborn(
                platform, "delete", "vm", name, "-n", ns, "--wait=false", "--ignore-not-found"
            )
            time.sleep(pace_s)

    users = [threading.Thread(target=user, daemon=True) for user in (come, go)]
    for user in users:
        user.start()
    for kill in kills:
        kill(platform)
    for user in users:
        user.join()
    until("the new ones run", lambda: _running(platform, ns) == set(new), timeout_s=200)
    until("both sides have the same", lambda: _same(platform, ns), timeout_s=120)
    assert set(platform.vms(ns)) == set(new)


def _running(platform: Platform, ns: str) -> set[str]:
    """Return the VMs, if all of them are running; otherwise an empty set."""
    done = platform.cluster.try_kubectl("get", "vm", "-n", ns, "-o", "json")
    vms = json.loads(done.stdout)["items"] if done.returncode == 0 else []
    said = {one["metadata"]["name"]: one.get("status", {}).get("printableStatus") for one in vms}
    return set(said) if set(said.values()) == {"Running"} else set()


def _same(platform: Platform, ns: str) -> bool:
    vmis = platform.cluster.get("-n", ns, "vmi")["items"]
    on_bus = platform.vms(ns).values()
    return {one["metadata"]["uid"] for one in vmis} == {one["uid"] for one in on_bus}


def _emptied(platform: Platform, ns: str) -> None:
    platform.cluster.kubectl("delete", "vm,vmi", "--all", "-n", ns, "--timeout=120s")
    until("nothing is left", lambda: not platform.vms(ns), timeout_s=60)


@pytest.mark.timeout(300)
def test_every_request_is_fulfilled_despite_kills(platform: Platform) -> None:
    with platform.cluster.namespace("kills") as ns:
        _play(platform, ns, 8, _bridge, _nats, _apiserver, _etcd)
        _emptied(platform, ns)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_creates_and_deletes_complete_despite_kills(platform: Platform) -> None:
    kills = (_bridge, _nats, _apiserver, _etcd)
    with platform.cluster.namespace("kills-many") as ns:
        _play(platform, ns, 100, *kills, *kills, *kills)
        _emptied(platform, ns)


@pytest.mark.timeout(200)
def test_an_api_server_that_is_away_for_long_ends_nothing(platform: Platform) -> None:
    with platform.cluster.namespace("away") as ns:
        platform.apply(ns, vm("steady"))
        platform.ready(ns, "steady")
        uid = platform.vms(ns)["steady"]["uid"]
        platform.cluster.apiserver.kill()
        time.sleep(5)
        assert platform.vms(ns)["steady"]["state"] == "Running"
        platform.cluster.apiserver.start()
        _ready(platform)
        platform.apply(ns, vm("next"))
        until("another one runs", lambda: _running(platform, ns) == {"steady", "next"}, 60)
        assert platform.vms(ns)["steady"]["uid"] == uid
        _emptied(platform, ns)
