"""What the commands need to know of packages: a suffix tells them, and they bring their own options."""

from __future__ import annotations

import typer

from specc.errors import InputError

SUFFIX = ".specc"


def is_package(model: str) -> bool:
    return model.endswith(SUFFIX)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, *names: str) -> None:
    """Refuse options that were settled when the package was saved; InputError names the first."""
    for name in names:
        if is_given(context, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(flag, context.params[name], f"left out: {context.params['model']} has its own")
