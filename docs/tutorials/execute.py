"""Execute the tutorials in place: python docs/tutorials/execute.py [names]; without names all of them.

``--small`` uses the small settings of a notebook's metadata, in one kernel, and writes nothing: a quick check.
"""

import argparse
import base64
import copy
import io
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
_SHARED = "import functools, normscope; normscope.open = functools.cache(normscope.open)"  # a model opens once for all


def read(path: Path) -> Any:
    """A notebook; the kernel it names does not matter, because this interpreter runs it."""
    return nbformat.read(path, as_version=4)


def parameters(notebook: Any) -> Any:
    """The cell with the settings, tagged ``parameters`` as papermill wants it."""
    return next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))


def with_small_settings(notebook: Any) -> Any:
    """A copy whose settings are the small ones of its metadata."""
    small = copy.deepcopy(notebook)
    lines = [f"{name} = {value!r}" for name, value in small.metadata["normscope"]["small"].items()]
    parameters(small).source += "\n" + "\n".join(lines)
    return small


@contextmanager
def kernel(folder: Path) -> Iterator[KernelManager]:
    """A kernel of this interpreter that works in a folder and imports normscope from this checkout."""
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    path = os.pathsep.join(filter(None, [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]))
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # bars of tqdm want widgets
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    manager.start_kernel(cwd=str(folder), env=environment)
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def cpu_seconds(manager: KernelManager) -> float:
    """What a kernel has taken of a processor so far: unlike time on the clock, it hardly depends on what else runs."""
    times = psutil.Process(manager.provisioner.pid).cpu_times()
    return times.user + times.system


def execute(notebooks: Iterable[Any], shared: bool = False) -> Iterator[tuple[Any, float]]:
    """Every notebook with its outputs and the seconds of a processor that it took, one after the other in one kernel.

    Names of one notebook are forgotten before the next begins; ``shared`` keeps the models that ``ns.open`` opened.
    """
    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder)) as manager:
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            if shared:
                client.execute_interactive(_SHARED, timeout=60)
            for notebook in notebooks:
                began = cpu_seconds(manager)
                run = NotebookClient(notebook, timeout=600, km=manager, record_timing=False)
                run.kc = client
                for number, cell in enumerate(notebook.cells):
                    run.execute_cell(cell, number)
                client.execute_interactive("%reset -f", timeout=60, silent=True)
                yield notebook, cpu_seconds(manager) - began
        finally:
            client.stop_channels()


def smaller(picture: str) -> str:
    """A PNG in base64, with a palette if that makes it smaller."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return min(picture, base64.b64encode(file.getvalue()).decode(), key=len)


def clean(notebook: Any) -> Any:
    """The notebook without what differs from one execution to the next: timings, versions, counts of executions."""
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.metadata.pop("execution", None)
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    kept = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook.metadata = {**kept, "language_info": {"name": "python"}, "normscope": notebook.metadata["normscope"]}
    return notebook


def main() -> None:
    """Execute the notebooks whose file names contain one of the given texts."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="parts of file names")
    options.add_argument("--small", action="store_true", help="small settings; write nothing")
    given = options.parse_args()
    chosen = [path for path in NOTEBOOKS if not given.names or any(name in path.name for name in given.names)]
    if not chosen:
        sys.exit(f"no notebook is named so; there are: {', '.join(path.name for path in NOTEBOOKS)}")
    if given.small:
        runs = execute((with_small_settings(read(path)) for path in chosen), shared=True)
        for path, (_, seconds) in zip(chosen, runs, strict=True):
            print(f"{path.name}: {seconds:.1f} s of CPU")
        return
    for path in chosen:
        [(notebook, seconds)] = execute([read(path)])
        nbformat.write(clean(notebook), path)
        print(f"{path.name}: {seconds:.1f} s of CPU")


if __name__ == "__main__":
    main()
