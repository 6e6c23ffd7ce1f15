"""Mends what Griffe, which reads the API for mkdocstrings, makes of objects that it inspects."""

import inspect
import re
from typing import Any

import griffe


class CythonMethods(griffe.Extension):
    """Replaces the alias that Griffe makes of a Cython method by a function.

    The methods say that they are of the private module that is compiled, and their class that it is of the public
    package. Griffe makes an alias of each, which leads nowhere.
    """

    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, agent: Any, **_: Any) -> None:
        """Called by Griffe once an alias is there, with the node of the class."""
        if not node.is_class:
            return
        for method in node.children:
            if method.name == alias.name and type(method.obj).__name__ == "cython_function_or_method":
                agent.handle_function(method)


class PlainAttributes(griffe.Extension):
    """Takes the docstring of its type from an attribute: what an ``int`` is need not be said."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Called by Griffe once an attribute is there, with the node of its value."""
        if attr.docstring and attr.docstring.value == inspect.getdoc(type(node.obj)):
            attr.docstring = None


class Roles(griffe.Extension):
    """Makes links of the roles that docstrings name objects with, as ``:class:`~pystale.ReplayBuffer```.

    They are Sphinx's, which editors show too; Markdown knows none of them. What has no page stays a name.
    """

    ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(?P<short>~?)(?P<text>[\w.]+)(?: <(?P<target>[\w.]+)>)?`")

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe once an object is there."""
        if obj.docstring:
            obj.docstring.value = self.ROLE.sub(self._link, obj.docstring.value)

    @staticmethod
    def _link(role: re.Match[str]) -> str:
        target = role["target"] or role["text"]
        text = role["text"].rpartition(".")[2] if role["short"] else role["text"]
        if target[0].isupper():
            target = f"pystale.{target}"
        if "." not in target:  # a method of the same class
            return f"`{text}`"
        return f'<autoref optional identifier="{target}"><code>{text}</code></autoref>'
