"""The servers of pools, one module for each kind, behind one port."""
