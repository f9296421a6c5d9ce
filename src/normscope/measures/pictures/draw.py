"""Draw the bundled pictures: ``python -m normscope.measures.pictures.draw [FOLDER]``, by default this one."""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

SIDE = 96
Colours = npt.NDArray[np.float64]


def drawn_pictures() -> dict[str, Image.Image]:
    """The pictures by name."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / (SIDE - 1)
    noise = np.random.default_rng(0)
    smooth = np.sum([_grown(noise.random((size, size, 3))) * size**-0.5 for size in (3, 6, 12, 24, 48)], axis=0)
    checks = ((8 * x).astype(int) + (8 * y).astype(int)) % 2
    waves = 0.5 + 0.5 * np.sin(2 * np.pi * (6 * x + 3 * y))
    return {
        "1-gradient": _image(np.stack([x, y, 1 - x], -1)),
        "2-shapes": _shapes(),
        "3-waves": _image(np.stack([waves, waves**2, 1 - waves], -1)),
        "4-checks": _image(np.stack([checks, 0.2 + 0.6 * checks, 0.9 - 0.7 * checks], -1)),
        "5-noise": _image(noise.random((SIDE, SIDE, 3)).round(1)),
        "6-letters": _letters(),
        "7-clouds": _image((smooth - smooth.min()) / (smooth.max() - smooth.min())),
        "8-landscape": _landscape(),
    }


def _image(colours: Colours) -> Image.Image:
    return Image.fromarray((255 * colours.clip(0, 1)).astype(np.uint8))


def _grown(colours: Colours) -> Colours:
    """Colours (size, size, 3) as a smooth picture."""
    large = Image.fromarray((255 * colours).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(large, dtype=np.float64) / 255


def _shapes() -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((8, 8, 44, 44), fill="crimson")
    draw.rectangle((54, 12, 88, 40), fill="royalblue")
    draw.polygon([(24, 54), (6, 90), (44, 90)], fill="seagreen")
    draw.line([(54, 88), (90, 54)], fill="black", width=5)
    return image


def _letters() -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "lightyellow")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(22)
    for row, text in enumerate(("NORM", "SCOPE", "x + f(x)")):
        draw.text((5, 5 + 29 * row), text, fill=("black", "darkred", "navy")[row], font=font)
    return image


def _landscape() -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "skyblue")
    draw = ImageDraw.Draw(image)
    draw.ellipse((66, 8, 86, 28), fill="gold")
    draw.polygon([(0, 70), (30, 30), (55, 62), (72, 44), (96, 72), (96, 96), (0, 96)], fill="slategray")
    draw.rectangle((0, 74, 96, 96), fill="forestgreen")
    draw.rectangle((20, 60, 38, 78), fill="sienna")
    draw.polygon([(16, 60), (29, 48), (42, 60)], fill="brown")
    return image


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, picture in drawn_pictures().items():
        picture.save(folder / f"{name}.png", optimize=True)
