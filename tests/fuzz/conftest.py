"""Puts shared test modules on the path."""

import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))
