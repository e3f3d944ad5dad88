"""The test kit: verified fakes, and the contracts that verify them."""
