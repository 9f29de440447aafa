"""Combined user data is what cloud-init 22.4.2 read, as recorded in golden/user-data.json.

The record has each message, and the cloud-config and other parts that cloud-init's own classes
(UserDataProcessor, CloudConfigPartHandler) made of it. A changed message must be read again.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from virtbus.nodeagent.core.user_data import Config, combined
from virtbus.schemas.user_data import content_type

GOLDEN = json.loads((Path(__file__).parent / "golden" / "user-data.json").read_text())
FILE = {"path": "/etc/ours", "content": "b3Vycw==", "encoding": "b64"}
OURS: Config = {"hostname": "web", "ssh_authorized_keys": ["ours"]}
SCRIPT = "#!/bin/sh\necho '$(id)' ü\n"
CONFIG = "#cloud-config\nwrite_files: [{path: /a}]\nhostname: mine\nssh_authorized_keys: [k2]\n"
OWN_RULES = "#cloud-config\nmerge_how: dict(replace)\nwrite_files: [{path: /own}]\n"
TEMPLATE = "## template: jinja\n#cloud-config\nwrite_files: [{path: /j}]\n"
ARCHIVE = "#cloud-config-archive\n- content: |\n    #cloud-config\n    write_files: [{path: /c}]\n"
MAIL = (
    'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="b"\n\n'
    "--b\nContent-Type: text/x-shellscript\n\n#!/bin/sh\n"
    "--b\nContent-Type: text/cloud-config\n\n#cloud-config\nwrite_files: [{path: /m}]\n--b--\n"
)
CASES: dict[str, list[str | bytes]] = {
    "one cloud-config": [CONFIG],
    "two cloud-configs": [CONFIG, "#cloud-config\nwrite_files: [{path: /b}]\n"],
    "a script": [SCRIPT],
    "a script and a cloud-config": [SCRIPT, CONFIG],
    "a cloud-config with its own rules": [CONFIG, OWN_RULES],
    "a template": [TEMPLATE, CONFIG],
    "an archive": [ARCHIVE],
    "a mail": [MAIL],
    "a gzip": [gzip.compress(CONFIG.encode(), mtime=0), SCRIPT],
    "a gzip of a mail": [gzip.compress(MAIL.encode(), mtime=0)],
}


def message(sources: list[str | bytes]) -> bytes:
    data = [one.encode() if isinstance(one, str) else one for one in sources]
    made = combined([(content_type(one), one) for one in data], OURS, {"write_files": [FILE]})
    assert made is not None
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_message_is_the_one_that_cloud_init_read(case: str) -> None:
    assert message(CASES[case]).decode() == GOLDEN[case]["message"]


@pytest.mark.parametrize("case", CASES)
def test_cloud_init_found_the_platforms_file_at_the_end_of_the_users(case: str) -> None:
    read: dict[str, Any] = GOLDEN[case]["cloud_config"]
    assert read["write_files"][-1] == FILE
    theirs = "mine" if CONFIG in CASES[case] or case == "a gzip" else "web"
    assert read["hostname"] == theirs
    assert "ours" in read["ssh_authorized_keys"]


def test_cloud_init_found_all_scripts_and_all_files() -> None:
    found = {case: [path["path"] for path in GOLDEN[case]["cloud_config"]["write_files"]]
             for case in CASES}  # fmt: skip
    assert found["two cloud-configs"] == ["/a", "/b", "/etc/ours"]
    assert found["a mail"] == found["a gzip of a mail"] == ["/m", "/etc/ours"]
    scripts = {case for case in CASES if "text/x-shellscript" in dict(GOLDEN[case]["others"])}
    assert scripts == {
        *("a script", "a script and a cloud-config", "a mail", "a gzip", "a gzip of a mail"),
    }
