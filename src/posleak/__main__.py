"""The entry point, `posleak` and `python -m posleak`: the net is there before the command line is imported."""

from __future__ import annotations

from .show.failures import net


def main() -> None:
    """Run the command line; also what goes wrong while it is imported becomes a message and an exit status."""
    with net():
        from .cli import main as run

        run()


if __name__ == "__main__":
    main()
