"""Documents that outlive the daemon, stored beside the SSD tier's blocks."""
