"""Reconciles VirtualMachines."""
