"""How mkdocstrings reads the types of the public API: ``normscope.watch`` stays a package, which the stub has as an object."""

from typing import Any

import griffe


class Stubs(griffe.Extension):
    """Leaves out what a stub says of a name that is also a package."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called for each module and stub once its members are known."""
        if mod.path == "normscope" and str(mod.filepath).endswith(".pyi"):
            mod.members.pop("watch", None)
