"""The command line: each command parses its options, calls the public function of the same name and prints the result.

Importing this package imports no command: `cli.commands` does, after the error handler (`cli.failures`) is in place.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"commands": ["main"]})
