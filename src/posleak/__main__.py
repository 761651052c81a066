"""Entry point of `posleak` and `python -m posleak`."""

from __future__ import annotations

from .cli.failures import error_handler


def main() -> None:
    """Run the command line. The error handler is installed first, so that it also covers the import of the commands."""
    with error_handler():
        from .cli.commands import main as run

        run()


if __name__ == "__main__":
    main()
