"""What people use in tests of their own: the store conformance suite, faults, clocks."""
