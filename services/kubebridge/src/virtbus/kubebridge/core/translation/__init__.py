"""Translates a VMI to `vm.create`, with the contents of what it refers to."""
