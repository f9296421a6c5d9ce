"""Words on the sphere: embeddings, what heads do to words, singular vectors, journeys through the layers."""

from normscope.models.factors import Singular, singular_factors
from normscope.words.embeddings import OutputNorm, embedding_distances, extreme_tokens, token_scores
from normscope.words.geometry import head_update, norm_curves, norm_points, strongest_head
from normscope.words.journey import Journey, follow
from normscope.words.maps import MAPS, places
from normscope.words.notes import notes_on
from normscope.words.probes import Found, Updates, nearest_keys, nearest_values, updates_of
from normscope.words.scores import FEWEST, head_table, probed
from normscope.words.search import Nearest, nearest
from normscope.words.singular import MATRICES, head_factors, oriented, singular_tables
from normscope.words.tables import nearest_table, update_table
from normscope.words.vocabulary import NOUNS, Word, common_nouns, plain_word, probe_words, tokens_of

__all__ = [
    "FEWEST",
    "MAPS",
    "MATRICES",
    "NOUNS",
    "Found",
    "Journey",
    "Nearest",
    "OutputNorm",
    "Singular",
    "Updates",
    "Word",
    "common_nouns",
    "embedding_distances",
    "extreme_tokens",
    "follow",
    "head_factors",
    "head_table",
    "head_update",
    "nearest",
    "nearest_keys",
    "nearest_table",
    "nearest_values",
    "norm_curves",
    "norm_points",
    "notes_on",
    "oriented",
    "places",
    "plain_word",
    "probe_words",
    "probed",
    "singular_factors",
    "singular_tables",
    "strongest_head",
    "token_scores",
    "tokens_of",
    "update_table",
    "updates_of",
]
