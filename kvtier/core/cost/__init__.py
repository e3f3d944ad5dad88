"""Cost models: how long restoring and computing take, fitted to measurements."""
