"""`virtbus cri diag` collects what explains the pods of a node, and no secret."""

import json
from pathlib import Path

import pytest
import yaml

from virtbus.cli.__main__ import main

POD = {
    "schema_version": 1,
    "sandboxes": [{"id": "s1", "config": {"annotations": {"VirtletSSHKeys": "SECRET-1"}}}],
    "containers": [{"id": "c1", "config": {"envs": [{"key": "A", "value": "SECRET-2"}]}}],
    "machine": {"uid": "u1", "key": {"private": "SECRET-3", "public": "SECRET-4"}},
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder of virtbus-cri with a pod and a file that cannot be read."""
    folder = tmp_path / "state/cri/pods"
    folder.mkdir(parents=True)
    (folder / "web.json").write_text(json.dumps(POD))
    return tmp_path / "state"


def test_a_diagnosis_has_each_source_and_names_those_that_failed(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name, body in (("ip", "echo link"), ("nft", "echo broken >&2; exit 1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    (state / "cri/pods/torn.json").write_text("{")
    argv = ["cri", "diag", str(tmp_path / "out"), "--state-dir", str(state), "-o", "json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"pods.json", "rules.txt", "journal.txt"} <= set(told["failed"]) <= set(told["files"])
    assert "addresses.txt" in set(told["files"]) - set(told["failed"])
    assert (tmp_path / "out/addresses.txt").read_text() == "link\n"
    assert (tmp_path / "out/rules.txt.error").read_text() == "broken\n"
    assert "not installed" in (tmp_path / "out/journal.txt.error").read_text()
    pods = json.loads((tmp_path / "out/pods.json").read_text())
    assert pods["web"]["machine"]["uid"] == "u1"
    assert not any("SECRET" in path.read_text() for path in (tmp_path / "out").iterdir())
    assert main(argv) == 2
    assert "exists; name a new folder" in capsys.readouterr().err


def test_the_stored_pods_are_printed_without_their_keys(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cri", "dump-metadata", "--state-dir", str(state)]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["web"]["sandboxes"][0]["id"] == "s1"
    assert "SECRET" not in printed
    assert main(["cri", "dump-metadata", "--state-dir", str(state / "none")]) == 3
    assert "--state-dir" in capsys.readouterr().err


def test_the_objects_of_a_cluster_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cri", "gen"]) == 0
    plain = [one["kind"] for one in yaml.safe_load_all(capsys.readouterr().out)]
    assert plain[0] == "RuntimeClass"
    assert main(["cri", "gen", "--daemon-set", "--virtlet"]) == 0
    more = [one["kind"] for one in yaml.safe_load_all(capsys.readouterr().out)]
    assert more[: len(plain) + 1] == [*plain, "DaemonSet"]
    assert "CustomResourceDefinition" in more
