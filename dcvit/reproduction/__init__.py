"""Tables and figures of the paper, computed at the size of a desk or listed as commands for a cluster."""
