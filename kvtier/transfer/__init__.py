"""How bytes move between engines and the daemon."""
