"""Reconciles VirtualMachines: fields, status, run strategies and verbs."""
