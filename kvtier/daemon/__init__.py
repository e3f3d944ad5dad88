"""The daemon process: the node with its tiers, its sockets and its engine child."""
