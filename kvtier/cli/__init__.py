"""The command line: thin over the parts."""
