"""Backends: one file each, behind the port in `perdure.store`; none knows another."""
