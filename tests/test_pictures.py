"""Models of pixels and sound: what they read, from files, arrays and features, and what their positions are called."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.cli import run
from helpers.tiny_models import tiny_inputs, tiny_model
from normscope.errors import InputError
from normscope.machine.files import read_image
from normscope.measures.pictures import sample_pictures
from normscope.measures.pictures.draw import SIDE, drawn_pictures
from normscope.measures.sample import chosen_sample
from normscope.models import Observer, open_model


def saved(folder: Path, model: Any, processor: dict[str, Any] | None = None) -> str:
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_the_bundled_pictures_are_those_that_are_drawn() -> None:
    bundled, drawn = sample_pictures(), drawn_pictures()
    assert len(bundled) == len(drawn) == 8
    for name, one, other in zip(drawn, bundled, drawn.values(), strict=True):
        assert one.size == (SIDE, SIDE)
        if "letters" not in name:  # fonts come with Pillow
            assert np.abs(np.asarray(one, float) - np.asarray(other, float)).mean() < 2, name


@pytest.mark.parametrize(("kind", "mapping"), [("vit", "image"), ("dinov2", "image"), ("clip", "vision"), ("siglip", "vision")])
def test_states_of_pixels_are_those_of_plain_hooks(kind: str, mapping: str) -> None:
    module: Any = tiny_model(kind, mapping)
    pixels, seen = tiny_inputs(module)["pixel_values"], {}
    model = open_model(module)
    assert model.modality == "image"
    assert "vocabulary" not in model.offers
    sample = model.batch(pixels)
    model.forward(sample, Observer(state=lambda layer, x: seen.update({layer: x.clone()})))
    plain: list[torch.Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, args: plain.append(args[0])) for block in model.blocks]  # type: ignore[attr-defined]
    with torch.no_grad():
        module(**tiny_inputs(module))
    for handle in handles:
        handle.remove()
    for layer, states in enumerate(plain):
        assert torch.equal(seen[layer], states)
        assert states.shape[:2] == sample.tokens.shape


def test_the_towers_of_clip_are_two_streams() -> None:
    module = tiny_model("clip", "vision")
    vision, text = (open_model(module, stream=name) for name in ("vision", "text"))
    assert set(vision.streams) == {"vision", "text"}
    assert vision.words(torch.arange(17))[:3] == ["CLS", "patch 0,0", "patch 0,1"]
    assert vision.words(torch.arange(17))[-1] == "patch 3,3"
    assert text.modality == "text"
    assert text(torch.arange(2, 9)[None]).isfinite().all()


def test_files_images_and_arrays_are_the_same_picture(tmp_path: Path) -> None:
    model = open_model(tiny_model("vit", "image"))
    picture = sample_pictures()[1]
    picture.save(tmp_path / "shapes.png")
    array = np.asarray(picture)
    features = [
        model.batch(x).features for x in (tmp_path / "shapes.png", picture, [picture], array, array[None], str(tmp_path))
    ]
    for other in features:
        assert other is not None
        assert torch.equal(other, features[0])  # type: ignore[arg-type]
    plain = torch.tensor(np.asarray(picture.resize((32, 32), Image.Resampling.BICUBIC))).float().permute(2, 0, 1)
    assert torch.allclose(features[0], 2 * plain[None] / 255 - 1, atol=1e-6)  # type: ignore[arg-type]


def test_a_folder_states_how_its_pictures_are_prepared(tmp_path: Path) -> None:
    about = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_mean": [0.1] * 3,
        "image_std": [0.2] * 3,
    }
    model = open_model(saved(tmp_path, tiny_model("vit", "image"), about))
    white = Image.new("RGB", (50, 40), "white")
    features = model.batch(white).features
    assert features is not None
    assert torch.allclose(features, torch.full((1, 3, 32, 32), (1 - 0.1) / 0.2), atol=1e-4)


def test_sound_has_a_default(tmp_path: Path) -> None:
    model = open_model(tiny_model("whisper", "speech"), stream="encoder")
    assert model.modality == "sound"
    sample = chosen_sample(model, None, None, None, 0)
    assert sample.features is not None
    assert tuple(sample.features.shape[1:]) == model.feature_shape
    assert model(sample).isfinite().all()
    assert model.words(sample.tokens[0])[:2] == ["frame 0", "frame 1"]


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    model = open_model(tiny_model("vit", "image"))
    whole = tmp_path / "whole.png"
    sample_pictures()[6].save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:4000])
    text = tmp_path / "text.png"
    text.write_text("no image")
    bomb = tmp_path / "bomb.png"
    Image.new("1", (12_000, 12_000)).save(bomb)
    (tmp_path / "empty").mkdir()
    for bad in (cut, text, bomb, tmp_path / "absent.png"):
        with pytest.raises(InputError, match="image"):
            read_image(bad)
    for given in (tmp_path / "empty", np.zeros((4, 4, 3)), np.zeros((2, 2), np.uint8), torch.zeros(2, 3, 32), 7, []):
        with pytest.raises(InputError):
            model.batch(given)


def test_a_text_is_refused_for_pixels_and_pictures_for_text(tmp_path: Path) -> None:
    vit, llama = open_model(tiny_model("vit", "image")), open_model(tiny_model("llama", "causal"))
    with pytest.raises(InputError, match="images="):
        chosen_sample(vit, "a text", None, None, 0)
    assert len(chosen_sample(vit, None, None, None, 0).tokens) == 8
    assert len(chosen_sample(vit, None, None, 3, 0).tokens) == 3
    with pytest.raises(InputError, match="does not read pictures"):
        chosen_sample(llama, None, None, None, 0, images=sample_pictures())


def test_an_audit_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "vit", tiny_model("vit", "image"))
    sample_pictures()[0].save(tmp_path / "one.png")
    sample_pictures()[1].save(tmp_path / "two.png")
    images = [option for name in ("one.png", "two.png") for option in ("--images", str(tmp_path / name))]
    code, _, err = run(capsys, "audit", folder, *images, "--fresh", "--out", str(tmp_path / "audit"))
    assert code == 0, err
    about = json.loads((tmp_path / "audit" / "run.json").read_text())
    assert "one.png" in json.dumps(about)
