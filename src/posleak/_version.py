"""The version of posleak."""

__version__ = "0.1.0"
