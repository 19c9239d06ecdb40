"""Conversion of models to formats of other libraries: `dcvit convert`.

`source` opens a model, `formats` and `programs` write it, `logits` and `libraries` evaluate both sides, `card`
describes the result, and `conversion` puts these together.
"""
