"""Pages in HTML: the report of an evaluation, and the explorer of attention."""
