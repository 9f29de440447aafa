"""Pools as people see them: what is known of their sizes, and how old it is."""

import time
from typing import Any

import pytest
from cli.tests.fakes import Cli, Script
from cli.tests.test_fleet_verbs import node

from virtbus.schemas.api import NodePage
from virtbus.schemas.pool import PoolKind, PoolReport, PoolState

pytestmark = pytest.mark.integration

MIB = 1024**2


def pool(name: str, kind: PoolKind, **more: Any) -> PoolReport:
    return PoolReport(name=name, kind=kind, state=PoolState.READY, **more)


async def test_what_is_not_known_of_a_servers_pool_is_said(script: Script, cli: Cli) -> None:
    both = ("default.a", "default.b")
    an_hour_ago = time.time_ns() - 3600 * 10**9
    part = {"size_bytes": 8 * MIB, "place_bytes": {"default.a": 8 * MIB}}
    old = {"places_confirmed_ns": an_hour_ago}
    pools = (
        pool("dark", PoolKind.ISCSI, assigned=both),
        pool("disks", PoolKind.LOCAL, size_bytes=64 * MIB, free_bytes=MIB),
        pool("part", PoolKind.RBD, assigned=both, **part),
        pool("raw", PoolKind.BLOCK, assigned=("default.a",), **part),
        pool("whole", PoolKind.NFS, assigned=("default.a",), **part, **old),
    )
    script.answer("node", "list", NodePage(items=(node(pools=pools),)))
    listed = await cli("pool", "list")
    assert listed.code == 0, listed.err
    rows = [line.split() for line in listed.out.splitlines()[1:]]
    assert [(row[1], *row[4:6]) for row in rows] == [
        ("dark", "unknown", "unknown"),
        ("disks", "64MiB", "1MiB"),
        ("part", ">8MiB", "unknown"),
        ("raw", "8MiB", "-"),
        ("whole", "8MiB", "unknown"),
    ]
    assert "whole: sizes are 1h old: the server has not confirmed them since" in listed.err

    script.answer("node", "list", NodePage(items=(node(pools=pools),)))
    shown = (await cli("pool", "get", "part")).out.splitlines()
    assert [line.split()[1:] for line in shown[4:]] == [
        ["default.a", "8MiB"],
        ["default.b", "unknown"],
    ]


async def test_a_pool_of_a_newer_kind_is_listed(script: Script, cli: Cli) -> None:
    newer = {"node": "n1", "pools": [{"name": "fast", "kind": "nvmeof", "state": "Ready"}]}
    script.answer("node", "list", {"items": [newer]})
    listed = await cli("pool", "list")
    assert listed.code == 0, listed.err
    assert listed.out.splitlines()[1].split()[1:3] == ["fast", "nvmeof"]
