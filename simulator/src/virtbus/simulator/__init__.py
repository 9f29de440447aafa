"""The simulator: real agents on libvirt's test driver, with simulated imaged and netd.

`virtbus up --simulate` and the load tests run it. Must not enter: decisions of the agent.
"""
