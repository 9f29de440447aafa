"""Measures the budgets of docs/explanation/performance.md as ratios to raw libvirt.

`make bench` prints a table. Each figure is also one JSON line, for comparison over time.
"""
