"""An example of a tier: blocks as files of a directory. See ``kvtier.core.tier_registry``."""
