"""Weights of other libraries: their files, and the names and layouts of their parameters.

`tensors` reads the files, `links` relates their tensors to parameters of this project, one module for each family of
models holds that family's names and fields, and `weights` recognizes the family of a file.
"""
