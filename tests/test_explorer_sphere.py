"""The sphere of reports and the explorer, in a browser: where points are drawn, with and without WebGL, and how they move."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.browser import Tab, open_tab
from normscope.report.bundle import bundle
from normscope.report.sphere import scene_data
from normscope.report.theme import LIGHT, LINE_COLOURS, STEPS_ON_LIGHT
from normscope.results.figures import Cloud, Scene, Trail

SIDE = 400
COLOURS = {**LIGHT, "steps": STEPS_ON_LIGHT, "series": LINE_COLOURS}
PAGE = f"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Spheres</title><link rel="icon" href="data:,">
<style>body {{ margin: 0 }} .host {{ width: {SIDE}px; height: {SIDE}px; float: left }}</style>
<div class="host" id="left"></div><div class="host" id="right"></div>
<script>{bundle("sphere.js", name="spheres")}</script><script>
const colours = {json.dumps(COLOURS)};
const painted = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
const create = (id, options = {{}}) => spheres.createSphere(document.getElementById(id), {{ label: id, colours, ...options }});
const without = make => {{  // as in a browser where WebGL is switched off
  const {{ getContext }} = HTMLCanvasElement.prototype;
  HTMLCanvasElement.prototype.getContext = function (kind) {{ return kind === "2d" ? getContext.call(this, kind) : null; }};
  try {{ return make(); }} finally {{ HTMLCanvasElement.prototype.getContext = getContext; }}
}};
// The mean place, in pixels of the element, of what a picture has in one colour.
const centre = (sphere, [red, green, blue]) => {{
  const picture = sphere.picture(), {{ data }} = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height);
  let [x, y, count] = [0, 0, 0];
  for (let k = 0; k < data.length; k += 4) {{
    if (Math.abs(data[k] - red) + Math.abs(data[k + 1] - green) + Math.abs(data[k + 2] - blue) > 40) continue;
    x += (k / 4) % picture.width + 0.5; y += Math.floor(k / 4 / picture.width) + 0.5; count++;
  }}
  return [x / count, y / count, count];
}};
</script></html>"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab() as tab:
        place = tmp_path_factory.mktemp("sphere") / "page.html"
        place.write_text(PAGE, encoding="utf-8")
        tab.open(place, width=900)
        yield tab


@pytest.fixture(autouse=True)
def _clean(tab: Tab) -> Iterator[None]:
    tab.run("(() => { window.a?.dispose(); window.b?.dispose(); window.a = window.b = null; })()")
    yield
    assert not tab.errors


def directions(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def flat(points: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    return f"Float32Array.from({json.dumps(points.ravel().tolist())})"


def screen(elevation: float, azimuth: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The directions right, up and towards the camera as a rotation about the third axis and then one about the screen's."""
    turned = np.array([[-np.sin(azimuth), np.cos(azimuth), 0], [0, 0, 1], [np.cos(azimuth), np.sin(azimuth), 0]])
    c, s = np.cos(elevation), np.sin(elevation)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]]) @ turned


def circles(svg: str) -> dict[int, tuple[float, float]]:
    found = re.findall(r'<circle data-point="(\d+)" cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    return {int(index): (float(x), float(y)) for index, x, y in found}


@pytest.mark.parametrize("camera", [(0.3, -1.0, 1.0), (-0.9, 2.5, 0.7)])
def test_points_are_where_the_camera_sees_them(tab: Tab, camera: tuple[float, float, float]) -> None:
    elevation, azimuth, zoom = camera
    points = directions(50)
    svg = tab.run(f"""(() => {{
      a = create("left");
      a.camera = {{ elevation: {elevation}, azimuth: {azimuth}, zoom: {zoom} }};
      a.setPoints({{ positions: {flat(points)} }});
      return a.svg();
    }})()""")
    drawn = circles(svg)
    assert len(drawn) == len(points)
    seen = points @ screen(elevation, azimuth).T
    scale = 0.46 * SIDE * zoom
    for index, (x, y) in drawn.items():
        assert x == pytest.approx(SIDE / 2 + scale * seen[index, 0], abs=0.02)
        assert y == pytest.approx(SIDE / 2 - scale * seen[index, 1], abs=0.02)
    assert [seen[index, 2] for index in drawn] == sorted(seen[:, 2])  # near ones cover far ones


def test_webgl_and_2d_canvas_draw_the_same_picture(tab: Tab) -> None:
    """Points of distinct colours are where they are projected to, by both; a lost context changes nothing that is seen."""
    points = np.array([[0.3, 0.1, 0.95], [-0.3, 0.0, 0.95], [0.0, 0.3, 0.95], [0.1, -0.3, 0.95]]) @ screen(0.8, 0.9)
    bytes_ = [(213, 94, 0, 255), (0, 114, 178, 255), (0, 158, 115, 255), (204, 121, 167, 255)]
    found = tab.run(f"""(async () => {{
      const bytes = {json.dumps(bytes_)}, sizes = new Float32Array(4).fill(20);
      const input = {{ positions: {flat(points)}, colours: Uint8Array.from(bytes.flat()), sizes }};
      a = create("left"); b = without(() => create("right"));
      for (const sphere of [a, b]) {{ sphere.camera = {{ elevation: 0.8, azimuth: 0.9 }}; sphere.setPoints(input); }}
      const centres = sphere => bytes.map(colour => centre(sphere, colour));
      const at = bytes.map((_, k) => a.project(input.positions.slice(3 * k, 3 * k + 3)));
      const seen = {{ at, webgl: [a.webgl, b.webgl], painted: [centres(a), centres(b)] }};
      const context = a.canvases[0].getContext("webgl").getExtension("WEBGL_lose_context");
      const event = name => new Promise(done => a.canvases[0].addEventListener(name, () => setTimeout(done)));
      const lost = event("webglcontextlost"); context.loseContext(); await lost;
      seen.lost = [a.webgl, centres(a)];
      const restored = event("webglcontextrestored"); context.restoreContext(); await restored;
      seen.restored = [a.webgl, centres(a)];
      return seen;
    }})()""")
    assert found["webgl"] == [True, False]
    assert found["lost"][0] is False
    assert found["restored"][0] is True
    for painted in (*found["painted"], found["lost"][1], found["restored"][1]):
        for (x, y, _), (px, py, pixels) in zip(found["at"], painted, strict=True):
            assert pixels > 150
            assert (px, py) == pytest.approx((x, y), abs=1.0)


def test_a_scene_of_a_report_has_all_its_marks_and_names(tab: Tab) -> None:
    points = directions(30, 1)
    cloud = Cloud("tokens", [tuple(p) for p in points.tolist()], [f"t{i}" for i in range(30)])
    marked = Cloud("target", [(0.0, 0.6, 0.8)], ["Paris"], marked=True)
    trail = Trail("journey", [tuple(p) for p in directions(4, 2).tolist()], ["a", "b", "c", "d"])
    axes = ("first", "second", "third")
    scene = Scene("Map", (cloud, marked), (trail,), "A journey.", radius=1.0, axes=axes, order="layer")
    svgs = tab.run(f"""(async () => {{
      a = create("left"); b = without(() => create("right"));
      for (const sphere of [a, b]) sphere.setScene({json.dumps(scene_data(scene))});
      return [a.svg(), b.svg()];
    }})()""")
    assert svgs[0].replace(">left<", "><") == svgs[1].replace(">right<", "><")
    assert len(circles(svgs[0])) == 31
    assert svgs[0].count("<circle") == 31 + 4
    for text in ("Paris", *axes):
        assert f">{text}</text>" in svgs[0]
