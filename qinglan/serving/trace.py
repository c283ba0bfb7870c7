"""Errors for logs and tags, without their messages: those may hold what a user asked."""

import traceback


def where(error: BaseException) -> str:
    """The error's kind and the lines of code that it came through."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()
