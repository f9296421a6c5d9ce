"""Texts in print: how wide they are, and where to break them to fit a width."""

from typing import Any

FONT = "DejaVu Sans"  # comes with matplotlib, and has the papers' symbols (α, θ̇, √, ⟨⟩)


def font(size: float, *, bold: bool = False, colour: str = "#000000") -> dict[str, Any]:
    """Keywords of a matplotlib text: the font, and every character taken as it stands (``$`` is a dollar)."""
    weight = "bold" if bold else "normal"
    return {"fontfamily": FONT, "fontsize": size, "fontweight": weight, "color": colour, "parse_math": False}


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of one line in points (1/72 inch)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(family=FONT, size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, properties, False)
    return float(width)


def broken(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """The text in lines of at most ``width`` points, broken between words; no line for an empty text."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def printable(text: str) -> str:
    """The text with □ for every character that the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family=FONT))).get_charmap()
    return "".join(character if ord(character) in known else "□" for character in text)
