"""The type checker behind the executed annotations: beartype, with ints as floats as Python's type rules have it."""

import functools

import beartype

_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function):
    """Check the annotations of `function` in each call. The first call generates the checks: few functions are called.

    jaxtyping passes functions only, and two for each function of the package.
    """

    @functools.cache
    def checked():
        return _check(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return checked()(*args, **kwargs)

    return call
