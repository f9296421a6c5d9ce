"""The sphere of reports and the explorer, in a browser: where points are drawn, with and without WebGL, and how they move."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.browser import Tab
from normscope.explorer.page import FOLDERS
from normscope.report.bundle import bundle
from normscope.report.sphere import scene_data
from normscope.report.theme import LIGHT, LINE_COLOURS, STEPS_ON_LIGHT
from normscope.results.figures import Cloud, Scene, Trail

SIDE = 400
COLOURS = {**LIGHT, "steps": STEPS_ON_LIGHT, "series": LINE_COLOURS}
PAGE = f"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Spheres</title><link rel="icon" href="data:,">
<style>body {{ margin: 0 }} .host {{ width: {SIDE}px; height: {SIDE}px; float: left }}</style>
<div class="host" id="left"></div><div class="host" id="right"></div>
<script>{bundle("sphere.js", name="spheres")}</script><script>{bundle("video.js", FOLDERS, name="videos")}</script><script>
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
def tab(tab: Tab, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    place = tmp_path_factory.mktemp("sphere") / "page.html"
    place.write_text(PAGE, encoding="utf-8")
    tab.open(place, width=900)
    return tab


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


def test_a_point_is_dragged_to_where_the_pointer_is_and_elsewhere_the_camera_turns(tab: Tab) -> None:
    points = directions(20, 3)
    tab.run(f"""(async () => {{
      window.moved = []; window.cameras = 0;
      a = create("left", {{ onDrag: (index, place) => moved.push([index, ...place]) }}); b = create("right");
      spheres.shareCamera([a, b]);
      a.camera = b.camera = {{ elevation: 0.3, azimuth: -1 }};
      a.setPoints({{ positions: {flat(points)} }});
    }})()""")
    seen = points @ screen(0.3, -1.0).T
    index = int(seen[:, 2].argmax())
    mouse, scale = tab.page.mouse, 0.46 * SIDE
    x, y = SIDE / 2 + scale * seen[index, 0], SIDE / 2 - scale * seen[index, 1]
    mouse.move(x, y)
    mouse.down()
    mouse.move(120, 90, steps=3)
    (last, *place) = tab.run("moved.at(-1)")
    assert last == index
    right, up = (120 - SIDE / 2) / scale, (SIDE / 2 - 90) / scale
    wanted = np.array([right, up, np.sqrt(1 - right**2 - up**2)]) @ screen(0.3, -1.0)
    assert place == pytest.approx(wanted.tolist(), abs=1e-6)
    assert circles(tab.run("a.svg()"))[index] == pytest.approx((120, 90), abs=0.02)
    assert tab.run("[a.chosen, a.svg().includes(a.nameOf(a.chosen))]") == [index, False]  # a label of the screen alone
    mouse.move(-60, SIDE / 2)  # outside: on the rim
    assert np.linalg.norm(tab.run("moved.at(-1)")[1:]) == pytest.approx(1)
    assert np.dot(tab.run("moved.at(-1)")[1:], screen(0.3, -1.0)[2]) == pytest.approx(0, abs=1e-6)
    mouse.up()
    assert tab.run("a.chosen") == -1
    assert tab.run("a.camera") == {"elevation": 0.3, "azimuth": -1, "zoom": 1}
    count = tab.run("moved.length")
    mouse.move(SIDE - 3, SIDE - 3)
    mouse.down()
    mouse.move(SIDE - 33, SIDE - 18, steps=2)
    mouse.up()
    turned = {"elevation": pytest.approx(0.3 - 0.1), "azimuth": pytest.approx(-1 + 0.2), "zoom": 1}
    assert tab.run("[a.camera, b.camera]") == [turned, turned]
    assert tab.run("moved.length") == count


def test_keys_turn_choose_and_move(tab: Tab) -> None:
    """Every point can be reached and moved without a pointer, and Tab still leaves the sphere."""
    points = directions(5, 4)
    tab.run(f"""(async () => {{
      window.moved = [];
      a = create("left", {{ onDrag: (index, place) => moved.push([index, ...place]) }}); b = create("right");
      a.camera = {{ elevation: 0, azimuth: 0 }};
      a.setPoints({{ positions: {flat(points)} }});
      document.getElementById("left").focus();
    }})()""")
    press, said = tab.page.keyboard.press, lambda: tab.run("a.live.textContent")
    for key in ("ArrowUp", "ArrowRight", "+"):
        press(key)
    assert tab.run("a.camera") == pytest.approx({"elevation": 0.1, "azimuth": -0.1, "zoom": 1.2})
    press("0")
    press("Enter")
    first = tab.run("a.chosen")
    assert said().startswith(f"Point {first}, elevation ")
    for _ in range(first):
        press("Shift+Tab")
    for index in range(4):
        assert tab.run("a.chosen") == index
        assert tab.run("a.project(a.placeOf(a.chosen))[2]") >= 0  # turned to the front
        press("Tab")
    press("Enter")
    assert said().startswith("Arrow keys move Point 4,")
    before, (right, up) = points[4], tab.run("a.screen()")
    press("ArrowRight")
    press("Shift+ArrowUp")
    index, *place = tab.run("moved.at(-1)")
    assert index == 4
    assert np.linalg.norm(place) == pytest.approx(1)
    assert np.dot(place - before, right) > 0.01
    assert np.dot(place - before, up) > 0.03
    press("Escape")
    press("Tab")  # past the last point
    assert tab.run("[a.chosen, document.activeElement.id]") == [-1, "right"]


def test_fingers_pinch_and_drag(tab: Tab) -> None:
    points = directions(20, 3)
    tab.run(f"""(async () => {{
      window.moved = [];
      window.over = [];
      a = create("left", {{ onDrag: (index, place) => moved.push(index), onHover: index => over.push(index) }});
      a.setPoints({{ positions: {flat(points)} }});
    }})()""")
    touch = tab.page.context.new_cdp_session(tab.page)

    def finger(kind: str, *places: tuple[float, float]) -> None:
        spots = [{"x": x, "y": y, "id": k} for k, (x, y) in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": spots})

    index, x, y = tab.run("""(() => {
      const near = [...Array(20).keys()].sort((i, k) => a.project(a.placeOf(k))[2] - a.project(a.placeOf(i))[2])[0];
      return [near, ...a.project(a.placeOf(near)).slice(0, 2)];
    })()""")
    finger("touchStart", (x + 8, y))
    finger("touchEnd")
    assert tab.run("over") == [index]  # a tap shows what a point is
    finger("touchStart", (x + 8, y))
    finger("touchMove", (x, y + 60))  # upwards and downwards, where a page would scroll
    finger("touchMove", (x, y - 30))
    finger("touchEnd")
    assert set(tab.run("moved")) == {index}
    assert circles(tab.run("a.svg()"))[index] == pytest.approx((x, y - 30), abs=0.02)
    zoom = tab.run("a.camera.zoom")
    finger("touchStart", (150, 390), (250, 390))
    finger("touchMove", (140, 390), (260, 390))
    finger("touchMove", (100, 390), (300, 390))
    finger("touchEnd")
    assert tab.run("a.camera.zoom") / zoom == pytest.approx(2.0)
    elevation = tab.run("a.camera.elevation")
    finger("touchStart", (100, 300), (300, 300))  # two fingers turn, too, where one would scroll the page
    finger("touchMove", (100, 330), (300, 330))
    finger("touchEnd")
    assert tab.run("a.camera.elevation") - elevation == pytest.approx(0.2)


def test_shells_and_colours_show_the_radius(tab: Tab) -> None:
    """On a log scale equal ratios are equal distances; the wire sphere is the reference; colours run over all steps."""
    found = tab.run("""(async () => {
      a = create("left"); a.camera = { elevation: 0, azimuth: 0 };
      const positions = Float32Array.from([0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]), radii = Float64Array.of(1, 10, 100, 1000);
      const distances = () => [0, 1, 2, 3].map(i => a.placeOf(i)[1]);
      const places = show => { a.setRadius(show); a.setPoints({ positions, radii, shellRadius: 100 }); return distances(); };
      const shells = places({ show: "shells" }), wire = a.svg();
      const linear = places({ show: "shells", scale: "linear" }), none = places({ show: "none" });
      places({ show: "colour", limits: [1, 1000] });
      const coloured = a.svg();
      a.setRadius({ show: "shells" });
      a.setPoints({ positions, radii: Float64Array.of(1, 1.01, 1.02, 1.03), shellRadius: 1 });
      return { shells, wire, linear, none, coloured, alike: distances() };
    })()""")
    steps = np.diff(found["shells"])
    assert steps == pytest.approx([steps[0]] * 3)
    assert steps[0] > 0.1
    assert found["shells"][3] == pytest.approx(1)
    rings = " ".join(re.findall(rf'd="([^"]+)" stroke="{LIGHT["wire"]}"', found["wire"]))
    reach = [abs(float(x) - SIDE / 2) for x in re.findall(r"[ML]([\d.]+) ", rings)]
    assert max(reach) == pytest.approx(0.46 * SIDE * found["shells"][2], rel=0.01)
    assert found["linear"] == pytest.approx([0.001, 0.01, 0.1, 1])
    assert found["none"] == [1, 1, 1, 1]
    fills = dict(re.findall(r'data-point="(\d)"[^>]* fill="([^"]+)"', found["coloured"]))
    assert [fills["0"], fills["3"]] == [STEPS_ON_LIGHT[0], STEPS_ON_LIGHT[-1]]
    assert max(found["alike"]) - min(found["alike"]) < 0.02  # nearly equal radii look nearly equal


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
      document.getElementById("left").focus();
      return [a.svg(), b.svg()];
    }})()""")
    tab.page.keyboard.press("Enter")
    for _ in range(tab.run("a.chosen") - 1):
        tab.page.keyboard.press("Shift+Tab")
    assert tab.run("a.live.textContent").startswith("layer 1: b, elevation")
    assert ">layer 1: b</text>" not in tab.run("a.svg()")  # what is chosen is no part of a picture
    assert svgs[0].replace(">left<", "><") == svgs[1].replace(">right<", "><")
    assert len(circles(svgs[0])) == 31
    assert svgs[0].count("<circle") == 31 + 4
    for text in ("Paris", *axes):
        assert f">{text}</text>" in svgs[0]


def test_a_video_has_every_frame_at_its_time_and_can_be_cancelled(tab: Tab) -> None:
    """Frames are told apart by where a point is; the browser's own player reads the file and jumps in it."""
    found = tab.run("""(async () => {
      const red = Uint8Array.from([213, 94, 0, 255]), sizes = Float32Array.of(40);
      a = create("left"); b = create("right");
      for (const sphere of [a, b]) sphere.camera = { elevation: 0, azimuth: 0 };
      const at = frame => Float32Array.of(Math.cos(frame / 16 - 0.6), Math.sin(frame / 16 - 0.6), 0);
      const shown = [], progress = [], places = [];
      const show = frame => {
        shown.push(frame);
        for (const sphere of [a, b]) sphere.setPoints({ positions: at(frame), colours: red, sizes });
      };
      const panels = [a, b].map(sphere => ({ title: sphere.label, layers: () => sphere.layers() }));
      const options = { panels, frames: 20, show, colours, caption: frame => `t = ${frame}`, rate: 6 };
      const blob = await videos.record({ ...options, onProgress: share => progress.push(share) });
      const video = Object.assign(document.createElement("video"), { muted: true, src: URL.createObjectURL(blob) });
      await new Promise((done, fail) => {
        video.onloadeddata = done;
        video.onerror = () => fail(new Error(video.error.message));
      });
      const copy = Object.assign(document.createElement("canvas"), { width: video.videoWidth, height: video.videoHeight });
      const pen = copy.getContext("2d", { willReadFrequently: true });
      const presented = time => new Promise((done, fail) => {  // the frame of this time is the one that is seen
        const look = (_, { mediaTime }) => Math.abs(mediaTime - time) < 0.002 ? done() : video.requestVideoFrameCallback(look);
        video.requestVideoFrameCallback(look);
        setTimeout(() => fail(new Error(`no frame at ${time} s`)), 20000);
      });
      for (const frame of [11, 0, 12, 19, 5]) {
        const seen = presented(frame / 6);
        video.currentTime = (frame + 0.5) / 6;
        await seen;
        pen.drawImage(video, 0, 0);
        const means = centre({ picture: () => copy }, [213, 94, 0])[0];
        places.push([means, 16 + 200 + 8 + 200 + a.project(at(frame))[0] - 200]);
      }
      const stop = new AbortController();
      const halt = { onProgress: () => stop.abort(), signal: stop.signal };
      const cancelled = await videos.record({ ...options, ...halt }).catch(error => error.name);
      const { VideoEncoder } = window;
      delete window.VideoEncoder;
      const words = await videos.record(options).catch(error => error.message);
      window.VideoEncoder = VideoEncoder;
      const { videoWidth, videoHeight, duration } = video;
      return { size: [videoWidth, videoHeight], type: blob.type, shown, progress, places, duration, cancelled, words };
    })()""")
    assert found["type"] == "video/webm"
    assert found["size"] == [2 * SIDE + 3 * 16, 40 + SIDE + 36]
    assert found["shown"][:21] == [0, *range(20)]
    assert found["progress"] == pytest.approx([k / 20 for k in range(1, 21)])
    assert found["duration"] == pytest.approx(20 / 6, abs=0.001)
    for mean, wanted in found["places"]:  # of the points of both spheres
        assert mean == pytest.approx(wanted, abs=2.0)
    assert found["cancelled"] == "AbortError"
    assert found["words"].startswith("This browser cannot make WebM videos")


def test_trails_fade_and_marks_follow_their_shell(tab: Tab) -> None:
    points = directions(6, 5)
    way = np.stack([points * (0.7 + 0.1 * k) for k in range(4)])
    found = tab.run(f"""(async () => {{
      a = create("left");
      a.camera = {{ elevation: 0, azimuth: 0 }};
      a.setPoints({{ positions: {flat(points)} }});
      a.setTrails({{ steps: 4, positions: {flat(way)} }});
      const trailed = a.svg();
      a.setTrails(null);
      const plain = a.svg();
      a.setRadius({{ show: "shells", limits: [1, 100] }});
      a.setPoints({{ positions: {flat(points)}, radii: new Float64Array(6).fill(10), shellRadius: 100 }});
      a.setMarks([{{ position: [0, 1, 0], text: "five <tokens>", radius: 10 }}, {{ position: [0, 0, 1] }}]);
      const marked = a.svg();
      a.setMarks(null);
      a.setPoints({{ positions: {flat(points)}, labels: ["one", null, "three", null, null, null] }});
      const labelled = a.svg();
      a.setPoints({{ positions: new Float32Array([NaN, 0, 0, 0, 1, 0]) }});
      return {{ trailed, plain, marked, labelled, distance: a.distance(10), unfinished: a.svg() }};
    }})()""")
    trail = re.findall(rf'd="([^"]+)" stroke="{LINE_COLOURS[0].lower()}" stroke-opacity="([\d.]+)"', found["trailed"])
    assert sum(path.count("M") for path, _ in trail) == 3 * 6
    assert LINE_COLOURS[0].lower() not in re.sub("<circle[^>]*>", "", found["plain"])
    newest = max(float(opacity) for _, opacity in trail)
    assert newest > 3 * min(float(opacity) for _, opacity in trail)
    (ring, top) = re.findall(rf'cx="([\d.]+)" cy="([\d.]+)" [^>]*fill="none" stroke="{LIGHT["ink"]}"', found["marked"])
    assert (float(ring[0]), float(ring[1])) == pytest.approx((SIDE / 2 * (1 + 0.92 * found["distance"]), SIDE / 2), abs=0.1)
    assert float(top[1]) == pytest.approx(SIDE / 2 * 0.08, abs=0.1)
    assert ">five &lt;tokens&gt;</text>" in found["marked"]
    assert re.findall(r">(\w+)</text>", found["labelled"]) == ["one", "three"]
    assert list(circles(found["unfinished"])) == [1]


def test_many_changes_are_one_painting_and_canvases_follow_the_size_of_the_element(tab: Tab) -> None:
    found = tab.run("""(async () => {
      const host = document.getElementById("left"), paintings = [];
      a = create("left", { axes: ["x", "y", "z"] });
      await painted();
      const { paint } = a;
      a.paint = function () { paintings.push(performance.now()); paint.call(this); };
      const positions = new Float32Array(3 * 256).fill(0.5);
      for (let k = 0; k < 5; k++) { a.setPoints({ positions }); a.camera = { azimuth: k }; a.draw(); }
      await painted();
      const count = paintings.length, before = [a.canvases[1].width, host.scrollWidth];
      host.style.width = "200px";
      while (a.canvases[1].width === before[0]) await painted();
      const narrow = a.canvases.map(({ width, height }) => [width, height]), png = await a.png();
      host.style.width = "";
      const kinds = { type: png.type, bytes: png.size, label: host.ariaLabel, role: host.role, focus: host.tabIndex };
      return { count, narrow, kinds, colours: a.svg().includes(colours.wire.toLowerCase()) };
    })()""")
    assert found["count"] == 1
    assert found["narrow"] == [[200, SIDE], [200, SIDE]]
    assert found["kinds"]["type"] == "image/png"
    assert found["kinds"]["bytes"] > 1000
    assert found["kinds"]["label"] == "left Arrow keys rotate, plus and minus zoom, Enter chooses a point."
    assert (found["kinds"]["role"], found["kinds"]["focus"]) == ("application", 0)
    assert found["colours"]


def test_spheres_that_are_gone_leave_their_graphics_memory(tab: Tab) -> None:
    """A browser keeps 16 WebGL contexts; more would take those of the first spheres away, with a warning."""
    assert tab.run("""(async () => {
      a = create("left");
      for (let k = 0; k < 18; k++) create("right").dispose();
      await painted();
      return [a.webgl, document.getElementById("right").childElementCount];
    })()""") == [True, 0]
