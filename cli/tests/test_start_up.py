"""Start-up: the imports of a verb, the help texts, completion and errors."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from virtbus.cli import progress, units
from virtbus.cli.commands import virtbus
from virtbus.cli.failures import CliError
from virtbus.cli.vm import request, view
from virtbus.cli.wire import access
from virtbus.schemas import quantity, subjects
from virtbus.schemas.version import VERSION

BANNED = {
    *("nats", "asyncio", "aiohttp", "pydantic", "pydantic_settings", "opentelemetry", "rich"),
    *("yaml", "ssl", "subprocess", "virtbus.schemas", "importlib.metadata", "difflib"),
}


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "virtbus.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VIRTBUS_RUN_DIR": "/nonexistent", "HOME": "/nonexistent", **env},
    )


def test_create_path_imports_nothing_slow() -> None:
    code = (
        "import sys; import virtbus.cli.__main__ as m;"
        "code = m.main(['vm', 'create', 'a', '--image', 'tiny', '--server', 'nats://127.0.0.1:1']);"
        "import virtbus.cli.wire.watch, msgpack; print(*sys.modules); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 5, ended.stderr
    loaded = set(ended.stdout.split())
    assert not {name for name in BANNED if name in loaded}


def verbs() -> list[list[str]]:
    runner_verbs: list[list[str]] = []
    context = virtbus.make_context("virtbus", ["version"])
    for name in virtbus.list_commands(context):
        found = virtbus.get_command(context, name)
        inner = getattr(found, "list_commands", None)
        children = inner(context) if inner else []
        runner_verbs += [[name, child] for child in children] or [[name]]
    return runner_verbs


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_every_verb_has_examples(verb: list[str]) -> None:
    result = CliRunner().invoke(virtbus, [*verb, "--help"])
    assert result.exit_code == 0, result.output
    assert "Examples:" in result.output
    assert f"virtbus {' '.join(verb)}" in result.output.split("Examples:")[1]


def test_typo_gets_a_suggestion_and_exit_2() -> None:
    ended = command("vm", "lst")
    assert ended.returncode == 2
    assert "Did you mean 'list'?" in ended.stderr
    assert json.loads(command("vm", "lst", "-o", "json").stderr)["error"]["reason"] == "usage"


def test_group_without_a_verb_shows_its_help() -> None:
    ended = command("vm")
    assert ended.returncode == 2
    assert "Examples:" in ended.stderr
    assert "error:" not in ended.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell: str) -> None:
    ended = command("completion", shell)
    assert ended.returncode == 0
    assert "_VIRTBUS_COMPLETE" in ended.stdout


def test_completion_offers_verbs_and_is_silent_without_a_bus() -> None:
    env = {"_VIRTBUS_COMPLETE": "bash_complete", "COMP_CWORD": "2", "COMP_WORDS": "virtbus vm l"}
    assert command(**env).stdout.split() == ["plain,list", "plain,logs"]
    env |= {"COMP_CWORD": "3", "COMP_WORDS": "virtbus vm get w"}
    ended = command(**env)
    assert (ended.stdout.strip(), ended.stderr) == ("", "")


def test_version_is_an_option_too() -> None:
    ended = command("--version")
    assert (ended.returncode, ended.stdout) == (0, f"virtbus {VERSION}\n")


def test_version_names_every_part() -> None:
    versions = json.loads(command("version", "-o", "json").stdout)["versions"]
    assert set(versions) >= {"cli", "bus", "schemas", "controller"}
    assert yaml.safe_load(command("version", "-o", "yaml").stdout)["versions"] == versions


def test_subjects_are_those_of_the_schemas() -> None:
    uid = "0192f0c1-2d3e-7abc-8def-0123456789ab"
    assert subjects.api("vm", "watch") == "virtbus.api.v1.vm.watch"
    assert subjects.events(uid) == f"virtbus.evt.*.{uid}.>"
    assert subjects.progress("n1", uid, "pull") == f"virtbus.node.n1.progress.{uid}.pull"
    assert subjects.rpc("n1", "agent", "console") == "virtbus.node.n1.rpc.agent.console"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("nats://h", ("h", 4222)),
        ("h:1", ("h", 1)),
        ("nats://[::1]:2", ("::1", 2)),
        ("tls://u:p%40@h:3", ("h", 3)),
    ],
)
def test_server_urls(text: str, place: tuple[str, int]) -> None:
    (found,) = access.parse_url(text)
    assert (found.host, found.port) == place
    if found.user:
        assert (found.user, found.password, found.tls) == ("u", "p@", True)


@pytest.mark.parametrize("text", ["", "http://h", "nats://:1", "h:0", "h:x", "h:99999"])
def test_wrong_server_urls_are_usage_errors(text: str) -> None:
    with pytest.raises(CliError) as caught:
        access.parse_url(text)
    assert caught.value.exit_code == 2


def test_private_key_is_refused_before_it_travels(tmp_path: os.PathLike[str]) -> None:
    key = os.path.join(tmp_path, "id")
    with open(key, "w", encoding="utf-8") as file:
        file.write("-----BEGIN OPENSSH PRIVATE KEY-----\nx\n")
    with pytest.raises(CliError, match="private key"):
        request.ssh_keys([key])


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1536, 17 * 1024**2, 5 * 1024**4])
def test_sizes_read_as_in_the_schemas(count: int) -> None:
    assert units.size(count) == quantity.format_bytes(count)


def test_bar_is_bounded_by_its_total() -> None:
    assert "100 %" in progress.bar("x", 300, 100)
    assert "%" not in progress.bar("x", 300, None)


def test_wait_without_a_goal_names_the_goals_and_the_help_of_its_verb() -> None:
    ended = command("vm", "create", "x", "--image", "tiny", "--wait")
    assert ended.returncode == 2
    assert "One of: running, ready." in ended.stderr
    assert "`virtbus vm create --help`" in ended.stderr


def test_yaml_error_points_at_its_line_in_real_lines(tmp_path: Path) -> None:
    file = tmp_path / "vm.yaml"
    file.write_text("a:\n  b: c: d\n")
    ended = command("vm", "create", "-f", str(file))
    assert ended.returncode == 2
    assert f"\n  in {file}, line 2" in ended.stderr
    assert "\\x0a" not in ended.stderr


def test_full_output_is_one_error_and_a_closed_pipe_is_none() -> None:
    line = f"{sys.executable} -m virtbus.cli version"
    full = subprocess.run(
        ["/bin/sh", "-c", f"{line} > /dev/full"], capture_output=True, text=True, check=False
    )
    assert full.returncode == 1
    assert full.stderr.startswith("error: the output failed: No space left on device\nhint:")
    closed = subprocess.run(
        ["/bin/bash", "-c", f"{line} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--port", "99999"), 2),
        (("--data", "/proc/nowhere"), 5),
        (("--listen", "0.0.0.0", "--nodes", "n2"), 2),
    ],
)
def test_an_impossible_up_fails_without_a_traceback(arguments: tuple[str, ...], code: int) -> None:
    ended = command("up", "--simulate", *arguments)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr


def test_a_single_detail_is_printed_once() -> None:
    body = {"code": 400, "message": "cpus: too few", "details": [_DETAIL]}
    assert CliError.answered(body).as_lines() == ["error: cpus: too few", "    hint: one at least"]


_DETAIL = {"path": "cpus", "message": "too few", "hint": "one at least"}


def test_long_image_references_are_short_in_tables() -> None:
    url = "http://images.example/long/way/to/the/t.qcow2@sha256:" + "a" * 64
    assert view.short(url) == "…/t.qcow2@sha256:aaaa…"
    assert view.short("tiny") == "tiny"


def test_transfer_shows_nothing_before_its_first_byte() -> None:
    stream = io.StringIO()
    steps = progress.Steps(shown=True, stream=stream)
    steps.transfer("image", 0, None)
    assert not stream.getvalue()
