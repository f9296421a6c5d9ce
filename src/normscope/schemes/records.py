"""Schemes as plain records, for tables, JSON and pages."""

from typing import Any

from normscope.schemes.law import block_radius, join_stages
from normscope.schemes.scheme import NORM_TITLES, Scheme, Slots


def scheme_record(scheme: Scheme) -> dict[str, Any]:
    """Everything that the slots say and imply, as text; a scheme that changes with depth joins its stages."""
    stages = list(scheme.stages)
    attention = [stage.attention for stage in stages]
    feedforward = [stage.feedforward for stage in stages]
    laws = [stage.law_of(stage.attention) for stage in stages]

    def joined(texts: list[str]) -> str:
        return join_stages(scheme, texts)

    def slot_texts(of: list[Slots]) -> dict[str, str]:
        return {slot: joined([slots.texts[slot] for slots in of]) for slot in of[0].texts}

    return {
        "name": scheme.name,
        "title": scheme.title,
        "norm": joined([NORM_TITLES[stage.norm] for stage in stages]),
        **slot_texts(attention),
        "speed": joined([law.speed.text for law in laws]),
        "radial": joined([str(law.radial) for law in laws]),
        "radius": joined([block_radius(stage) for stage in stages]),
        "attention": joined([law.attention for law in laws]),
        "statement": joined([law.statement for law in laws]),
        "update": scheme.update,
        "flow": scheme.flow,
        "feedforward": {
            **slot_texts(feedforward),
            "update": joined([stage.feedforward.update("F", stage.norm_text) for stage in stages]),
        },
        "alpha": joined([stage.schedule.text for stage in stages]),
        "learned": joined([stage.learned for stage in stages]),
        "initial": joined([stage.initial_text for stage in stages]),
        "weights": joined([stage.weights for stage in stages]),
        "users": scheme.users,
        "papers": list(scheme.papers),
        "note": scheme.note,
    }


def same_feedforward(scheme: Scheme) -> bool:
    """Whether the feed-forward layer has the attention's slots, apart from those of attention alone, in every stage."""
    return all(stage.attention.without_attention == stage.feedforward for stage in scheme.stages)
