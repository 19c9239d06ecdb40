"""Parameters of models from anywhere: runs, big_vision and other libraries, and conversion to their formats.

`families.open_weights` opens files as `Weights`, whose model is a `family.Description`; `placement` puts parameters on
their devices. `export` writes files. `tensors` reads the files of other libraries.

Each family of models is one module with two tables, both for reading and for writing: the keys of its config.json
(`config_table.Key`), and the names of its tensors, from which `torch_layers` makes a list of `links.Link`.
`lm_fields` and `hf_vision` have the keys that configs of language models and of vision models share.
`families.FAMILIES` names all families.
"""
