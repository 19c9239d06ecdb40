"""Tables and figures of the paper: small versions computed on one machine (scale "desk"), or commands for a cluster."""

from input_pipeline.optional import FROM_FLAX, require_extra

require_extra("train", FROM_FLAX)
