"""The hostile client: short with a fixed seed, longer with a random one."""

import json
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from tests.fuzz.ground import PROBE
from tests.fuzz.run import Run
from tests.fuzz.schedule import Schedule, may_send
from tests.fuzz.targets import targets
from tests.fuzz.watching import CALLBACK_S

from virtbus.bus.provisioning import permissions
from virtbus.schemas.catalogue import CHANNELS, Plane

SEED = 13
SHORT_S, LONG_S = 60.0, 300.0
TURNS = 300


def test_a_seed_always_means_the_same_messages() -> None:
    first, again = (list(islice(Schedule(7, targets()).turns(), TURNS)) for _ in range(2))
    assert first == again
    assert list(islice(Schedule(7, targets()).turns(100), 20)) == first[100:120]


def test_every_message_is_sent_with_a_right_to_it() -> None:
    turns = islice(Schedule(7, targets()).turns(), TURNS)
    wrong = [s.subject for shots in turns for s in shots if not may_send(s.user, s.subject)]
    assert not wrong


def test_every_subject_that_strangers_may_use_is_attacked() -> None:
    attacked = {one.id.partition(" on ")[0] for one in targets()}
    asked = {c.id for c in CHANNELS if c.plane in {Plane.REQUEST, Plane.STREAM}}
    assert asked <= attacked | {"agent.command"}
    roles = [r for r in permissions.fixed() if r.user not in {"admin", "controller"}]
    assert {one.user for one in targets()} >= {role.user for role in roles}


BURNS = """
import time, uvloop

async def burn():
    begun = time.thread_time()
    while time.thread_time() - begun < 0.6:
        pass

uvloop.run(burn())
"""


def test_the_probe_reports_a_callback_that_uses_too_much_cpu(tmp_path: Path) -> None:
    module = tmp_path / "tests" / "fuzz" / "webhooks.py"
    module.parent.mkdir(parents=True)
    module.write_text(BURNS)
    environ = os.environ | {"PYTHONPATH": str(PROBE), "VIRTBUS_FUZZ_PROBE": str(tmp_path)}
    argv = [sys.executable, "-m", "tests.fuzz.webhooks"]
    subprocess.run(argv, cwd=tmp_path, env=environ, check=True)
    (told,) = [json.loads(file.read_text()) for file in tmp_path.glob("*.jsonl")]
    assert told["service"] == "webhooks"
    assert told["used_s"] > CALLBACK_S
    assert "burn" in told["stack"][-1]


@pytest.mark.integration
@pytest.mark.alone
@pytest.mark.timeout(420)
def test_strangers_with_every_credential_cost_others_nothing(tmp_path: Path) -> None:
    run = Run(SEED, SHORT_S, journal=tmp_path / "fuzz.jsonl")
    assert not run.run()


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(900)
def test_strangers_cost_others_nothing_in_five_minutes_of_a_random_seed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    run = Run(seed, LONG_S, journal=tmp_path / "fuzz.jsonl")
    assert not run.run(), f"make fuzz SEED={seed} MINUTES=5"
