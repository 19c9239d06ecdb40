"""The type checker behind the executed annotations: beartype, with ints as floats as Python's type rules have it."""

import beartype

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
