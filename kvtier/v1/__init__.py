"""Generated from proto/kvtier/v1 by `make proto`; do not edit."""
