"""Has Griffe, which reads the API for mkdocstrings, see the methods of Cython classes.

They say that they are of the private module that is compiled, and their class that it is of the public package. Griffe
makes an alias of each, which leads nowhere.
"""

from typing import Any

import griffe


class CythonMethods(griffe.Extension):
    """Replaces the alias that Griffe makes of a Cython method by a function."""

    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, agent: Any, **_: Any) -> None:
        """Called by Griffe once an alias is there, with the node of the class."""
        if not node.is_class:
            return
        for method in node.children:
            if method.name == alias.name and type(method.obj).__name__ == "cython_function_or_method":
                agent.handle_function(method)
