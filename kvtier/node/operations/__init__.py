"""Operations of operators and announced requests: drop, pin, warm, attach, watch."""
