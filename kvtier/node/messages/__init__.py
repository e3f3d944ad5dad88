"""The node's input and output: events, actions, and the settings of tiers."""
