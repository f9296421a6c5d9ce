"""The figures and tables of the three papers and some of others: published beside measured, with a verdict for each."""

from normscope.errors import InputError, did_you_mean
from normscope.papers.entry import Entry

__all__ = ["Entry", "all_entries", "find_entries"]


def all_entries() -> dict[str, Entry]:
    """Every entry by its id, paper by paper."""
    from normscope.papers import flows, others, panels, subspaces, trainings, words

    papers = (subspaces.ENTRIES, trainings.ENTRIES, flows.ENTRIES, panels.ENTRIES, words.ENTRIES, others.ENTRIES)
    return {entry.id: entry for entries in papers for entry in entries}


def find_entries(names: tuple[str, ...]) -> list[Entry]:
    """The entries that ids select: ``2:fig5a``, ``2`` for all of a paper, ``others``; without any, all."""
    entries = all_entries()
    chosen: dict[str, Entry] = {}
    for name in names or entries:
        found = {key: entry for key, entry in entries.items() if name in (key, key.partition(":")[0])}
        if not found:
            raise InputError(f"no figure or table '{name}'{did_you_mean(name, entries)} (normscope reproduce lists them)")
        chosen |= found
    return list(chosen.values())
