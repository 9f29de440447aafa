"""`virtbus bus init`, `add-node`, `remove-node`, `check` on files; tests of the bus start them."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from virtbus.bus.client.connection import NatsLink
from virtbus.bus.client.link import Raw
from virtbus.bus.errors import BusError, DeniedError
from virtbus.bus.provisioning import config_reload
from virtbus.bus.provisioning.bus_directory import BusDirectory, BusPlan
from virtbus.cli.__main__ import main
from virtbus.cli.bus import nodes, place


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_init_writes_a_bus_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(tmp_path / "bus")
    init = ["bus", "init", base, "--host", "localhost", "--port", "1", "--node", "n1", "-o", "json"]
    assert main(init) == 0
    first = told(capsys)
    assert first["url"] == "tls://localhost:1"
    assert f"{base}/creds/node-n1.creds" in str(first["changed"])
    assert main(init) == 0
    assert told(capsys)["changed"] == []
    assert main(["bus", "check", "--dir", base]) == 0


def test_three_servers_need_three_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bus", "init", str(tmp_path / "bus"), "--servers", "3", "--host", "a"]) == 1
    assert "3 times --host" in capsys.readouterr().err
    assert main(["bus", "init", str(tmp_path / "bus"), "--host", ","]) == 1
    assert "1 times --host" in capsys.readouterr().err
    assert main(["bus", "init", str(tmp_path / "bus")]) == 2
    assert "--host" in capsys.readouterr().err


def test_a_renewed_certificate_is_listed_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "bus"
    init = ["bus", "init", str(base), "--host", "localhost", "-o", "json"]
    assert main(init) == 0
    capsys.readouterr()
    (base / "server-1" / "server.crt").unlink()
    assert main(init) == 0
    pair = [str(base / "server-1" / name) for name in ("server.crt", "server.key")]
    assert told(capsys)["changed"] == pair


def test_a_server_that_does_not_answer_a_reload_may_have_reloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = AsyncMock(spec=NatsLink)
    link.ask.side_effect = TimeoutError

    async def announce(*_: object, **__: object) -> None:
        link.open.call_args.args[1](Raw("", b'{"server": {"id": "a", "name": "virtbus-1"}}'))

    link.send.side_effect = announce
    monkeypatch.setattr(config_reload, "GATHER_S", 0.01)
    monkeypatch.setattr(config_reload, "NatsLink", lambda *_: link)
    base = str(tmp_path / "bus")
    assert main(["bus", "init", base, "--host", "localhost"]) == 0
    assert main(["bus", "add-node", "n1", "--dir", base]) == 4
    assert "virtbus-1 has not answered within 60 s" in capsys.readouterr().err


def test_a_node_is_added_to_the_files_also_where_no_server_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(tmp_path / "bus")
    assert main(["bus", "init", base, "--host", "localhost", "--port", "1"]) == 0
    capsys.readouterr()
    assert main(["bus", "add-node", "n2", "--dir", base, "-o", "json"]) == 5
    assert len(told(capsys)["credentials"]) == 3  # type: ignore[arg-type]  # a list, by the next line
    assert (tmp_path / "bus/creds/netd-n2.creds").exists()
    assert main(["bus", "remove-node", "n2", "--dir", base]) == 5
    assert not (tmp_path / "bus/creds/netd-n2.creds").exists()
    assert main(["bus", "remove-node", "n2", "--dir", base]) == 5, "no server has read it yet"
    assert main(["bus", "remove-node", "n9", "--dir", base]) == 0


def test_each_revocation_makes_other_keys_and_a_check_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, creds = str(tmp_path / "bus"), tmp_path / "bus/creds"
    assert main(["bus", "init", base, "--host", "localhost", "--port", "1", "--node", "n1"]) == 0
    old = {path.name: path.read_text() for path in creds.iterdir()}
    assert main(["bus", "revoke-node", "n1", "--dir", base]) == 5
    assert "no server answers" in capsys.readouterr().err
    new = {path.name: path.read_text() for path in creds.iterdir()}
    changed = {name for name, text in new.items() if text != old[name]}
    assert changed == {"node-n1.creds", "imaged-n1.creds", "netd-n1.creds"}
    assert main(["bus", "revoke-node", "n1", "--dir", base, "--check"]) == 5
    assert {name: (creds / name).read_text() for name in new} == new
    assert main(["bus", "revoke-node", "n1", "--dir", base]) == 5
    assert (creds / "node-n1.creds").read_text() not in {old["node-n1.creds"], new["node-n1.creds"]}
    assert main(["bus", "check", "--dir", base]) == 0
    assert main(["bus", "revoke-node", "n9", "--dir", base]) == 1
    assert "add-node n9" in capsys.readouterr().err


def test_a_check_reports_each_problem_and_missing_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "bus"
    assert main(["bus", "check", "--dir", str(base)]) == 1
    assert "virtbus bus init" in capsys.readouterr().err
    assert main(["bus", "init", str(base), "--host", "localhost"]) == 0
    (base / "ca.key").chmod(0o644)
    assert main(["bus", "check", "--dir", str(base)]) == 1
    assert "chmod 0600" in capsys.readouterr().err


def test_each_cluster_has_a_bridge_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "bus"
    init = ["bus", "init", str(base), "--host", "localhost", "--port", "1", "--bridge", "east"]
    assert main(init) == 0
    assert main(["bus", "add-bridge", "west", "--dir", str(base)]) != 0  # no server answers
    assert "no server answers" in capsys.readouterr().err
    assert main(["bus", "check", "--dir", str(base)]) == 0
    text = (base / "server-1" / "accounts.conf").read_text()
    for account in ("BRIDGE", "BRIDGE-EAST", "BRIDGE-WEST"):
        assert f'"{account}" {{' in text
    for user in ("bridge", "bridge-east", "bridge-west"):
        assert (base / "creds" / f"{user}.creds").exists()


def test_a_nodes_container_runtime_gets_an_account_with_its_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "bus"
    assert main(["bus", "init", str(base), "--host", "localhost", "--port", "1"]) == 0
    assert main(["bus", "add-cri", "n1", "--dir", str(base)]) != 0
    assert "virtbus bus add-node n1" in capsys.readouterr().err
    for verb in ("add-node", "add-cri"):
        assert main(["bus", verb, "n1", "--dir", str(base)]) != 0  # no server answers
    accounts = base / "server-1" / "accounts.conf"
    assert '"CRI-N1" {' in accounts.read_text()
    assert (base / "creds" / "cri-n1.creds").exists()
    assert main(["bus", "check", "--dir", str(base)]) == 0
    assert main(["bus", "remove-node", "n1", "--dir", str(base)]) != 0
    assert "CRI-N1" not in accounts.read_text()
    assert not (base / "creds" / "cri-n1.creds").exists()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[str, BusError | None]:
    """A server that reloads; the answers to a login by user name, by default none is refused."""
    answer: dict[str, BusError | None] = {}

    async def answers(_prepared: BusDirectory, plan: BusPlan, user: str) -> Any:
        return dict.fromkeys((names[0] for names in plan.servers), answer.get(user))

    for module in (nodes, place):
        monkeypatch.setattr(module, "answers", answers)
    monkeypatch.setattr(nodes, "reload", lambda _prepared: ["virtbus-1"])
    return answer


@pytest.mark.parametrize("verb", ["remove-node", "revoke-node"])
def test_a_server_that_cannot_be_checked_may_still_accept_old_keys(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reached: dict[str, BusError | None],
    verb: str,
) -> None:
    """An expired certificate ends each login with the same kind of error as refused keys."""
    base = str(tmp_path / "bus")
    assert main(["bus", "init", base, "--host", "localhost", "--node", "n1"]) == 0
    expired = DeniedError("the bus is not trusted: certificate has expired")
    reached |= dict.fromkeys(("sys", "node-n1", "withdrawn-n1"), expired)
    assert main(["bus", verb, "n1", "--dir", base]) == 5
    assert "localhost: the bus is not trusted" in capsys.readouterr().err
    reached |= {"sys": None, "node-n1": None, "withdrawn-n1": DeniedError("refused")}
    repeat = ["--check"] if verb == "revoke-node" else []
    assert main(["bus", verb, "n1", "--dir", base, *repeat]) == 0
