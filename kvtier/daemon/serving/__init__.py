"""The daemon's sockets, secrets and notifications to systemd."""
