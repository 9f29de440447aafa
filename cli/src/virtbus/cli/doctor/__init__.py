"""`virtbus doctor`: checks this host, with one finding for each requirement of virtbus.

doctor only reads and probes. A finding names the command that repairs it, but no code here changes
the host.
"""
