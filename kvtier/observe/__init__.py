"""What operators see: every metric in one table, and the log."""
