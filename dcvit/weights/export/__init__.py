"""Conversion of models to formats of other libraries: `dcvit convert`.

`formats` and `programs` write a model, `check` evaluates both sides, `card` describes the result, and `conversion` puts
these together.
"""

from input_pipeline.optional import require_extra

require_extra("train")
