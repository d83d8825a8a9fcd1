"""The entry point of the command `vbs`: errors and warnings become lines without a traceback."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import NoReturn

from variable_batch_size._extras import import_extra
from variable_batch_size.cli.command import UsageError

EXPECTED = (ValueError, TypeError, OSError, ModuleNotFoundError, IndexError, Warning)


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
        if os.environ.get("VBS_TRACEBACK") and not hasattr(error, "format_message"):
            raise
        status = _report_error(error)
    sys.exit(status)


def _report_error(error: Exception) -> int:
    """Print an exception as a line, and return the exit status: 2 if the command line is wrong, otherwise 1."""
    if hasattr(error, "format_message"):  # of typer or click, whose classes depend on the version
        context = getattr(error, "ctx", None)
        message = error.format_message().rstrip(".")
        path = context.command_path if context else "vbs"
        return _report(f"{message}; see {path} --help", 2) if message else 2  # no message: the help was printed
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _report(f"{error.filename}: {error.strerror}; pass a path that can be used", 1)
    if isinstance(error, EXPECTED) and str(error):
        return _report(str(error), 2 if isinstance(error, UsageError) else 1)
    return _report(f"{type(error).__name__}: {error}; set VBS_TRACEBACK=1 to see where, and report it", 1)


def _report(message: str, status: int) -> int:
    """Print a message in one line, and return the exit status that it goes with."""
    print(f"vbs: error: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
