"""Another commit of this repository with an environment of its own, below build-out/older."""

import os
import subprocess
from pathlib import Path

from tests.hosts.box import ROOT

OLDER = ROOT / "build-out" / "older"


def python_of(commit: str) -> Path:
    """Return the interpreter with virtbus of `commit`; make it if it is missing.

    Raises:
        CalledProcessError: there is no such commit, or its lock cannot be synced.
    """
    sha = _output("git", "-C", str(ROOT), "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    tree = OLDER / sha
    python = tree / ".venv/bin/python"
    if not python.exists():
        tree.mkdir(parents=True, exist_ok=True)
        files = tree / ".tar"
        _output("git", "-C", str(ROOT), "archive", "-o", str(files), sha)
        _output("tar", "-xf", str(files), "-C", str(tree))
        files.unlink()
        uv = str(ROOT / "tools/uv")
        _output(uv, "--directory", str(tree), "sync", "--locked", "--no-dev", "--quiet")
    return python


def _output(*argv: str) -> str:
    environ = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
    return done.stdout
