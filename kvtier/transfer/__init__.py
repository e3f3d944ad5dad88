"""The Unix sockets between engines and the daemon, and the shared memory passed over them."""
