"""The entry point of the command `vbs`: errors and warnings become lines without a traceback."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from typing import Any, NoReturn

from variable_batch_size._extras import import_extra

USAGE_ERROR = 2  # the exit status of a command line that is wrong; other errors, such as of files, exit with 1
# How a message begins that is about what was typed: with an option, perhaps after what `sweep` puts before it.
UNDER = r"\S+(?: --save-every \S+)? under "
TYPED = re.compile(rf"({UNDER}.*?: )?(the (upper|lower) one of )?(--[a-z]|LOG |a rule must )")


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit: with 0, with 1 after an error, with 2 if the command line is wrong.

    Args:
        args: the command line without the program's name; by default, that of this process.
    """
    warnings.showwarning = lambda message, *_: print(f"vbs: warning: {message}", file=sys.stderr)
    if sys.stdout is None:  # the shell has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process exits
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a picture in another encoding than UTF-8
    try:
        for library in ("typer", "rich"):
            import_extra(library, "cli")
        from variable_batch_size.cli.app import app

        words = sys.argv[1:] if args is None else args
        status = app(args, standalone_mode=False, prog_name="vbs", obj=["vbs", *words])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more when it exits
        status = 0
    except KeyboardInterrupt:
        status = 130
    except MemoryError as error:
        status = _report(f"there is not enough memory ({error}); pass smaller numbers", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # of typer or click, whose classes depend on the version
            context = getattr(error, "ctx", None)
            message = error.format_message().rstrip(".")
            path = context.command_path if context else "vbs"
            status = _report(f"{message}; see {path} --help", USAGE_ERROR) if message else USAGE_ERROR  # or help
        elif os.environ.get("VBS_TRACEBACK"):
            raise
        else:
            expected = isinstance(error, (ValueError, TypeError, OSError, ModuleNotFoundError, IndexError, Warning))
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                error = OSError(f"{error.filename}: {error.strerror}; pass a path that can be used")
            unexpected = f"{type(error).__name__}: {error}; set VBS_TRACEBACK=1 to see where, and report it"
            message = _in_options(str(error)) if expected and str(error) else unexpected
            status = _report(message, USAGE_ERROR if TYPED.match(message) else 1)
    sys.exit(status)


def _in_options(message: str) -> str:
    """Return a message of the package with the options of the command in the place of Python's arguments."""
    if "variable_batch_size.cli.app" not in sys.modules:  # an extra is missing
        return message
    import typer.main

    from variable_batch_size.cli.app import app

    options = _options_of(typer.main.get_command(app))

    def option(match: re.Match[str]) -> str:
        return options.get(match[0].removesuffix("="), match[0])

    # "mean_up must be > 0", also after what `sweep` puts before it, but not that of a file: "a.csv:3: nodes must be"
    before, under, rest = message.rpartition(": ") if re.match(UNDER, message) else ("", "", message)
    message = before + under + re.sub(r"^[a-z_]+(?= must )", option, rest)
    message = re.sub(r'\b[a-z_]+=(?=")', lambda match: option(match) + " " * (match[0] != option(match)), message)
    return re.sub(r"\b[a-z_]+=(?=[,;.]|$)", option, message)  # "limit it with bounds="


def _options_of(command: Any) -> dict[str, str]:
    """Return argument -> option of a command and the commands in it."""
    own = {parameter.name: parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
    for other in getattr(command, "commands", {}).values():
        own |= _options_of(other)
    return own


def _report(message: str, status: int) -> int:
    print(f"vbs: error: {' '.join(message.split())}", file=sys.stderr)
    return status
