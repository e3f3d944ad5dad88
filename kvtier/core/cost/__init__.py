"""What moving and what computing takes, fitted to what it took."""
