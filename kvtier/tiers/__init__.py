"""Where bytes live. Tiers keep and return blocks and decide nothing."""
