"""The controller: the public API, admission, placement, and the completion of deletes.

Any number run, all active; there is no leader on the create path. Must not enter: anything that
touches a host, or writes a VM's status.
"""
