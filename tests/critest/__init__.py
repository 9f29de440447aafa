"""Runs critest, built elsewhere, against containerd and virtbus on one node."""
