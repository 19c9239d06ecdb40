"""Parameters of models from anywhere: runs, big_vision and other libraries, and conversion to their formats.

`families.open_weights` opens files as `Weights`, whose model is a `family.Description`; `placement` puts parameters on
their devices. `export` writes files. `tensors` reads the files of other libraries.

A family of transformers is a row of `lm_families` or `vit_families`, for reading and for writing: the keys of its
config.json (`family.Row`), and the names of its tensors, from which `links` makes a list of `Link`. `families.FAMILIES`
names all families.
"""
