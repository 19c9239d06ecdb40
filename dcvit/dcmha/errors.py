"""Exception that an implementation of attention raises for a case that it does not support."""


class UnsupportedError(NotImplementedError):
    """An implementation does not support the arguments; the message is a one-line reason.

    It is a class of its own so that dispatch does not hide a NotImplementedError that JAX raises.
    """
