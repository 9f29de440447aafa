"""Runs crictl, built elsewhere, on a node with both runtimes."""
