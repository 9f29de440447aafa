"""Reconciles VirtualMachineInstances."""
