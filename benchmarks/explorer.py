"""The explorer in headless Chromium: steps a second beside numpy, frames a second, and the time until the page is interactive.

    python benchmarks/explorer.py [--seconds 1] [--csv FILE.csv]

- A step is one of Runge-Kutta 4 of Pre-LN with identity weights, four evaluations of attention in float64, in the page's
  JavaScript and in numpy on one thread. Both start from the same tokens and take turns in one run; their states are compared.
  Seconds are those of one core, so that other work on the machine counts little.
- Frames are those of two spheres with 256 tokens each, which all move in every frame: drawn alone, and in the sphere lab as it
  plays two schemes, with strips and numbers, after they have been computed. Chromium draws up to 60 a second. Without
  a graphics card, as in most containers, it draws with SwiftShader on the CPU, which says nothing about a laptop's integrated
  graphics: the time of the page's own thread in a frame, which is printed beside, is what both have to spend.
- Interactive is when the first view has been made and answers to keys, counted from the navigation to an exported page on disk;
  the other views are made when they are opened.
"""

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
from playwright.sync_api import CDPSession, Page, sync_playwright

from normscope.explorer.page import FOLDERS, explorer_data, render_explorer
from normscope.report.bundle import bundle
from normscope.schemes import NAMED, scheme_values

Numbers = npt.NDArray[np.float64]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
SIZES = [(64, 3), (256, 3), (1024, 3), (256, 16), (256, 64), (64, 64), (256, 256)]
BETA, STEP = 5.0, 0.05
TURNS = 5
COMPARED = 20  # steps after which the states are compared
FRAMES = 256
INTERACTIVE = 1.5  # seconds, the goal
FLAGS = ["--enable-unsafe-swiftshader", "--disable-dev-shm-usage"]

PREPARE = """([settings]) => {
  globalThis.measured = new simulation.Simulation(settings);
  return [...measured.start];
}"""
# As many steps as fit into the time; their number.
STEPS = """milliseconds => {
  const [run] = measured.runs, until = performance.now() + milliseconds;
  let steps = 0;
  for (; performance.now() < until; steps += 1) measured.step(run);
  return steps;
}"""
STATE = """count => {
  let moment = null;
  for (let i = 0; i <= count; i += 1) moment = measured.runs[0].moments.next().value;
  return [...moment.x];
}"""
SPHERES = """async ([tokens, seconds]) => {
  document.body.replaceChildren();
  const colours = {ink: "#222222", soft: "#666666", paper: "#ffffff", wire: "#cccccc", steps: ["#222266", "#eeaa22"],
    series: ["#2266aa"]};
  const spheres = [0, 1].map(() => {
    const host = document.body.appendChild(document.createElement("div"));
    Object.assign(host.style, {width: "480px", height: "480px", display: "inline-block"});
    return sphere.createSphere(host, {label: "tokens", colours});
  });
  const positions = new Float32Array(3 * tokens), radii = new Float32Array(tokens).fill(1);
  const paths = Float64Array.from({length: 3 * tokens}, (_, i) => Math.sin(12.9898 * i) * 43758.5453 % 1);
  const work = [], gaps = [];
  let last = null;
  const frame = now => {
    const began = performance.now();
    for (let i = 0; i < tokens; i += 1) {
      const angle = 6.28 * paths[3 * i] + now / 1000 * paths[3 * i + 1];
      const height = paths[3 * i + 2], wide = Math.sqrt(1 - height * height);
      positions.set([wide * Math.cos(angle), wide * Math.sin(angle), height], 3 * i);
    }
    for (const each of spheres) {
      each.setPoints({positions, radii, shellRadius: 1});
      each.paint();
    }
    work.push(performance.now() - began);
    if (last !== null) gaps.push(now - last);
    last = now;
  };
  const until = performance.now() + 1000 * seconds;
  while (performance.now() < until) await new Promise(next => requestAnimationFrame(now => { frame(now); next(); }));
  const middle = values => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const gl = document.createElement("canvas").getContext("webgl2");
  const named = gl?.getExtension("WEBGL_debug_renderer_info")?.UNMASKED_RENDERER_WEBGL ?? gl?.RENDERER;
  const card = gl ? gl.getParameter(named) : "no WebGL";
  return {fps: 1000 * gaps.length / gaps.reduce((sum, gap) => sum + gap, 0), work: middle(work), card};
}"""
PLAYED = """async seconds => {
  const view = document.getElementById("view-lab"), times = new Set();
  const observer = new MutationObserver(() => times.add(view.dataset.time));
  observer.observe(view, {attributeFilter: ["data-time"]});
  document.querySelector(".lab-play").click();
  const began = performance.now();
  await new Promise(done => setTimeout(done, 1000 * seconds));
  observer.disconnect();
  return [times.size, (performance.now() - began) / 1000];
}"""
READY = """globalThis.readyAt = new Promise(resolve => {
  const look = () => document.documentElement?.dataset.ready === "true" ? resolve(performance.now()) : setTimeout(look, 1);
  look();
});"""


def pre_ln(x: Numbers) -> Numbers:
    """ẋ = A(x/|x|) with identity weights."""
    theta = x / np.linalg.norm(x, axis=1, keepdims=True)
    logits = BETA * (theta @ theta.T)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    velocity: Numbers = (powers / powers.sum(axis=1, keepdims=True)) @ theta
    return velocity


def numpy_step(x: Numbers) -> Numbers:
    """One step of Runge-Kutta 4."""
    k1 = pre_ln(x)
    k2 = pre_ln(x + STEP / 2 * k1)
    k3 = pre_ln(x + STEP / 2 * k2)
    k4 = pre_ln(x + STEP * k3)
    return x + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def thread_time(session: CDPSession) -> float:
    """Seconds of a core that the page's thread has had."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "ThreadTime")


def steps(page: Page, tokens: int, dim: int, seconds: float) -> dict[str, Any]:
    """Steps in a second of a core of both, medians over turns, and how far apart their states are after the page's steps."""
    settings = {
        "schemes": [scheme_values(NAMED["pre"])], "tokens": tokens, "dim": dim, "beta": BETA, "step": STEP, "time": 1e4,
        "every": 1e4,
    }  # fmt: skip
    start = np.array(page.evaluate(PREPARE, [settings])).reshape(tokens, dim)
    rates: dict[str, list[float]] = {"page": [], "numpy": []}
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.evaluate(STEPS, 300)  # compiles
    x = numpy_step(start)
    for _ in range(TURNS):
        began = thread_time(session)
        done = page.evaluate(STEPS, 1000 * seconds / TURNS)
        rates["page"].append(done / (thread_time(session) - began))
        began, done, until = time.thread_time(), 0, time.perf_counter() + seconds / TURNS
        while time.perf_counter() < until:
            x, done = numpy_step(x), done + 1
        rates["numpy"].append(done / (time.thread_time() - began))
    session.detach()
    page.evaluate(PREPARE, [settings])
    state, x = page.evaluate(STATE, COMPARED), start
    for _ in range(COMPARED):
        x = numpy_step(x)
    page_rate, numpy_rate = (statistics.median(values) for values in rates.values())
    return {
        "tokens": tokens, "dim": dim, "page": page_rate, "numpy": numpy_rate, "ratio": page_rate / numpy_rate,
        "difference": float(np.abs(np.array(state).reshape(tokens, dim) - x).max()),
    }  # fmt: skip


def main() -> int:
    """Print the tables; status 1 if the states differ or the page is not interactive in time."""
    from helpers.get_browser import MISSING, find_browser

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each part")
    parser.add_argument("--csv", type=Path, help="also write the steps to this file")
    chosen = parser.parse_args()
    path = find_browser()
    if path is None:
        print(MISSING, file=sys.stderr)
        return 2
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.evaluate(bundle("simulation.js", FOLDERS, "simulation"))
        print(f"{'tokens':>6} {'dim':>4} {'steps/s':>9} {'ms/step':>8} {'numpy/s':>9} {'ratio':>6} {'difference':>11}")
        rows = []
        for tokens, dim in SIZES:
            rows.append(row := steps(page, tokens, dim, chosen.seconds))
            print(
                f"{tokens:6} {dim:4} {row['page']:9.1f} {1000 / row['page']:8.2f} {row['numpy']:9.1f} {row['ratio']:6.2f} "
                f"{row['difference']:11.1e}",
                flush=True,
            )
        page.evaluate(bundle("sphere.js", FOLDERS, "sphere"))
        drawn = page.evaluate(SPHERES, [FRAMES, max(2.0, chosen.seconds)])
        print(f"two spheres of {FRAMES} tokens: {drawn['fps']:.1f} frames/s, {drawn['work']:.2f} ms of JavaScript a frame")
        file = Path(folder) / "tour.html"
        file.write_text(render_explorer(explorer_data()), encoding="utf-8")
        page.add_init_script(READY)
        opened = []
        for _ in range(TURNS):
            page.goto("about:blank")
            page.goto(file.as_uri())
            opened.append(page.evaluate("readyAt") / 1000)
        page.goto("about:blank")
        page.goto(f"{file.as_uri()}#lab?tokens={FRAMES}&schemes=post,pre")
        page.wait_for_selector("#view-lab[data-run=done]")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        began = thread_time(session)
        frames, passed = page.evaluate(PLAYED, max(2.0, chosen.seconds))
        work = 1000 * (thread_time(session) - began) / frames
        print(f"sphere lab at play: {frames / passed:.1f} frames/s, {work:.1f} ms of the page's thread a frame")
        print(f"drawn by {drawn['card']}")
        ready = statistics.median(opened)
        print(f"interactive {ready:.2f} s after opening {file.stat().st_size / 1e6:.2f} MB from disk (goal {INTERACTIVE} s)")
        browser.close()
    if chosen.csv:
        with chosen.csv.open("w", newline="", encoding="utf-8") as content:
            writer = csv.DictWriter(content, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return int(ready > INTERACTIVE or any(row["difference"] > 1e-9 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
