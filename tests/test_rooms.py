"""The table of rooms in docs/design.md is true: no room imports one that it may not use."""

import ast
import re
from pathlib import Path

import pytest

import normscope

ROOT = Path(normscope.__file__).parent
DESIGN = Path(__file__).parent.parent / "docs" / "design.md"
EVERYONE = {"errors", "threads"}  # no rooms: the shared exception, and the number of threads


def allowed_rooms() -> dict[str, set[str]]:
    """Room → rooms that it may use, from the table under 'The rooms'."""
    section = DESIGN.read_text(encoding="utf-8").split("## The rooms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", section, re.MULTILINE)
    rooms: dict[str, set[str]] = {}
    for room, uses in rows:
        if uses == "everything":
            rooms[room] = set(dict(rows))
        elif uses == "the labs above":
            rooms[room] = {"stability", "subspaces", "words", *rooms["theorems"]}
        else:
            rooms[room] = {name for name in re.findall(r"\w+", uses) if name != "nothing"}
    return rooms


def reachable(room: str, rooms: dict[str, set[str]]) -> set[str]:
    """A room may also use what the rooms it uses may use: all of it lies above."""
    found, queue = set(), [room]
    while queue:
        for used in rooms[queue.pop()]:
            if used not in found:
                found.add(used)
                queue.append(used)
    return found


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)), f"{path}: relative import"
    return {name.split(".")[1] for name in names if name.startswith("normscope.")}


def files_of(room: str) -> list[Path]:
    return [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")]


def existing_rooms() -> list[str]:
    return sorted(
        {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
        - {"__init__", "__main__", "__pycache__"}
        - EVERYONE
        - {"py"}
    )


@pytest.mark.parametrize("room", existing_rooms())
def test_a_room_uses_only_what_it_may(room: str) -> None:
    rooms = allowed_rooms()
    assert room in rooms, f"'{room}' is not in the table of rooms"
    allowed = reachable(room, rooms) | {room} | EVERYONE
    for path in files_of(room):
        assert imports_of(path) <= allowed, f"{path.relative_to(ROOT)} reaches up to {imports_of(path) - allowed}"


def test_the_table_itself_only_looks_up() -> None:
    seen: set[str] = set()
    for room, uses in allowed_rooms().items():
        assert uses - {room} <= seen | ({room} if room == "cli" else set()), room
        seen.add(room)


def test_computing_rooms_print_nothing() -> None:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] == "cli":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), path
