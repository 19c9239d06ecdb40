"""Parameters of models from anywhere: runs, big_vision and other libraries.

`loading` opens and loads them, and `placement` puts them on their devices. `tensors` reads the files of other
libraries, `links` relates their tensors to parameters of this project, one module for each family of models holds that
family's names and fields, and `families` recognizes the family of a file.
"""
