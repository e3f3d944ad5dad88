"""Identity, index, policies and plans: the pure part.

Nothing here reads a clock, opens a socket, starts a thread, logs or draws a random number. Lists of
hashes and ``now_ns`` go in, values come out, so every decision can be replayed.
"""
