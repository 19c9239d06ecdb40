"""The type checker behind the executed annotations: beartype, with ints as floats as Python's type rules have it."""

import functools

import beartype

_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_checked: dict = {}


def check(function):
    """Check the annotations of `function` in each call. The first call generates the checks: few functions are called.

    jaxtyping passes two functions without a body for each function of the package: one has the annotations of the
    parameters, the other also that of the result. A function inside another is defined in each call of that one, and
    its checks are generated once.
    """
    if function.__name__ == "__del__":  # also called when the modules that the checks need are gone
        return function
    annotations = map(repr, function.__annotations__.items())
    key = (function.__module__, function.__qualname__, function.__code__.co_varnames, *annotations)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if key not in _checked:
            _checked[key] = _check(function)
        return _checked[key](*args, **kwargs)

    return call
