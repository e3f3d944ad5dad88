"""Test support: fakes, and the contract suites that verify them like real implementations."""
