"""Errors with a chain of causes."""


def caused(error: Exception, *causes: BaseException) -> Exception:
    """`error`, raised from the first cause, which was raised from the second, and so on."""
    link: BaseException = error
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return error
