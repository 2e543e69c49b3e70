"""How the reference reads this project's docstrings and classes, where its generator would expect them otherwise."""

import re
from typing import Any

import griffe

HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class Conventions(griffe.Extension):
    """Examples are headed `Example:`, and classes whose instances are shared are made by `__new__`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub(r"\1Examples:", obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        made = cls.members.get("__new__")
        says_something = isinstance(made, griffe.Function) and "args" not in made.parameters
        if says_something and "__init__" not in cls.members:
            cls.set_member("__init__", griffe.Function("__init__", parameters=made.parameters))
