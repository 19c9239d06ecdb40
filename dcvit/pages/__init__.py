"""Pages in HTML: the report of an evaluation, and the explorer of attention."""

from input_pipeline.optional import require_extra

require_extra("train")
