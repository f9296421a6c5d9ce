"""The named schemes by what their blocks have."""

from normscope.schemes import NAMED


def names_with(*features: str) -> list[str]:
    """The named schemes that have none but these features (``Scheme.features``)."""
    return [name for name, scheme in NAMED.items() if scheme.features <= set(features)]
