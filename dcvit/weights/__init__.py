"""Parameters of models from anywhere: runs, big_vision and other libraries, and conversion to their formats.

`families.open_weights` opens files as `Weights`; `loading` loads parameters into a model, and `placement` puts them on
their devices. `export` writes files. `tensors` reads the files of other libraries.

Each family of models is one module with two tables, which are used in both directions: its config.json as a list of
`config_table.Key`, and its tensors as a table of names, from which `torch_layers` makes a list of `links.Link`.
`lm_fields` and `hf_vision` have what the configs of language models and of vision models share. `families.FAMILIES`
names all families.
"""
