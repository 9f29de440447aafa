"""The budgets of docs/explanation/performance.md, measured as ratios against raw libvirt in the same run.

`make bench` prints a table; each figure is also one JSON line, for comparison over time.
"""
