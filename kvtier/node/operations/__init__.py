"""What operators and announced requests ask for: drop, pin, warm, attach, watch."""
