"""The seed reader, compiled for this machine, on YAML that people write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[1]
SOURCES = IMAGES / "src" / "seed"


def compiled(output: Path, *sources: Path) -> Path:
    subprocess.run(
        ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", output, *sources],
        check=True,
        timeout=60,
    )
    return output


@pytest.fixture(scope="module")
def yaml_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    helper = Path(__file__).parent / "yaml_json.c"
    return compiled(
        tmp_path_factory.mktemp("yaml") / "yaml_json",
        helper,
        SOURCES / "yaml.c",
        SOURCES / "yaml_scalar.c",
    )


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("seed") / "seed", *sorted(SOURCES.glob("*.c")))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1 # note\nb: x#y\n", {"a": "1", "b": "x#y"}),
        ("a:\n- b\n- c\nd: e", {"a": ["b", "c"], "d": "e"}),
        (
            "a:\n    - b: 1\n      c:\n      - 2\n    -   d: 3\n",
            {"a": [{"b": "1", "c": ["2"]}, {"d": "3"}]},
        ),
        ("- - a\n  - b\n-\n  - c\n- \n  d: e", [["a", "b"], ["c"], {"d": "e"}]),
        ("a: |\n  x: y # kept\n\n    z\n\n# note\nb: 1", {"a": "x: y # kept\n\n  z\n", "b": "1"}),
        ("a: |-\n  x\nb: |+\n  y\n\nc: |2\n    z\n", {"a": "x", "b": "y\n\n", "c": "  z\n"}),
        ("a: |+\n  x\n", {"a": "x\n"}),
        ("a: |\n  x", {"a": "x"}),
        ("a: >\n  x\n  y\n\n  z\n    more\n  end\n", {"a": "x y\nz\n  more\nend\n"}),
        ("a: 'it''s: #1'\nb: \"t\\tq\\\"\\u00e9\"\n", {"a": "it's: #1", "b": 't\tq"\u00e9'}),
        ("a: plain\n  goes on\nb: 'so\n  does this'", {"a": "plain goes on", "b": "so does this"}),
        ('a: [b, "c, d", {e: f}, [],\n  g] # note\n', {"a": ["b", "c, d", {"e": "f"}, [], "g"]}),
        ('{"a": {"b":[1, true, null]}}', {"a": {"b": ["1", "true", "null"]}}),
        ("# head\n---\na: http://h:80/p\n...\n", {"a": "http://h:80/p"}),
        ("a: b\r\nc:\r\n- d\r\n", {"a": "b", "c": ["d"]}),
        ("a:\nb: ~\na: 2", {"a": "2", "b": "~"}),
    ],
)
def test_yaml(yaml_json: Path, text: str, value: object) -> None:
    done = subprocess.run(
        [yaml_json], input=text.encode(), capture_output=True, check=True, timeout=10
    )
    assert json.loads(done.stdout) == value


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "a: 'b",
        "a: [b",
        "a:\n\tb: c",
        "a: &x b",
        "a: b\n  - c: d\n",
        "a:\n  b: c\n d: e",
        'a: "b" c',
        "a: @b",
        "[" * 500,
    ],
)
def test_yaml_refused(yaml_json: Path, text: str) -> None:
    done = subprocess.run([yaml_json], input=text.encode(), capture_output=True, timeout=10)
    assert done.returncode == 1
    assert done.stderr.startswith(b"line ")


def test_a_mistake_in_one_part_leaves_the_others(seed: Path, tmp_path: Path) -> None:
    given, made = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    (given / "meta-data").write_text(
        '{"instance-id": "i-1", "local-hostname": "h", "public-keys": {"k": ["ssh-rsa A"]}}'
    )
    (given / "user-data").write_text("#cloud-config\nruncmd: [\n")
    (given / "network-config").write_text(
        "version: 1\nconfig:\n- type: physical\n  name: eth0\n"
        "  mac_address: 52:54:00:00:00:01\n  subnets:\n"
        "  - {type: static, address: 10.0.0.5, netmask: 255.255.255.0, gateway: 10.0.0.1}\n"
    )
    subprocess.run([seed, given, made], check=True, timeout=10)
    assert (made / "hostname").read_text() == "h\n"
    assert (made / "authorized_keys").read_text() == "ssh-rsa A\n"
    assert (
        made / "net" / "0"
    ).read_text() == "mac 52:54:00:00:00:01\naddr 10.0.0.5/24\nroute default 10.0.0.1 -\n"
    assert (made / "notes").read_text() == "user-data: line 3: [ or { is never closed\n"


def test_vendor_data_counts_beside_a_script(seed: Path, tmp_path: Path) -> None:
    given, made = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    (given / "vendor-data").write_text(
        "#cloud-config\nwrite_files: [{path: /a, content: x, permissions: '0600'}]\n"
    )
    (given / "user-data").write_text("#!/bin/sh\n")
    subprocess.run([seed, given, made], check=True, timeout=10)
    assert (made / "script").read_text() == "#!/bin/sh\n"
    assert (made / "files" / "list").read_text() == "0\t0600\troot:root\twrite\tplain\t/a\n"
    (given / "user-data").write_text("#cloud-config\nruncmd: [ls]\n")
    subprocess.run([seed, given, tmp_path / "other"], check=True, timeout=10)
    assert not (tmp_path / "other" / "files" / "list").exists()


def test_commands_are_quoted(seed: Path, tmp_path: Path) -> None:
    given, made = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    (given / "user-data").write_text(
        '#cloud-config\nruncmd:\n- [echo, "it\'s", $HOME]\n- echo $HOME\n- a: b\npackages: [vim]\n'
    )
    subprocess.run([seed, given, made], check=True, timeout=10)
    assert (made / "runcmd").read_text() == "#!/bin/sh\n'echo' 'it'\\''s' '$HOME' \necho $HOME\n"
    notes = (made / "notes").read_text()
    assert "runcmd entry 3 is a mapping" in notes
    assert "packages is not supported" in notes
