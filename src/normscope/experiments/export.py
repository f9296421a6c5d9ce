"""export: Write a trained language model as a Hugging Face folder.

Train: normscope export runs/train-text-tiny-pre
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import model_validator

from normscope.experiments.experiment import Experiment, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, setting
from normscope.machine.memory import require_memory
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    import torch

    from normscope.transformer import Transformer

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_CONTEXT, _TOKENS = 2048, 64
_COLUMNS = {"family": "family", "weights": "weights", "difference": "largest difference of logits", "spread": "their spread"}


class Export(Experiment):
    """Write a trained language model as a Hugging Face folder.

    Chooses the family of transformers whose blocks match: Llama, Qwen3, BitNet, EXAONE 4, Gemma 2, Gemma 3 or StableLM.
    Settings that the family lacks, such as a learned step, are folded into the weights. The output folder is a complete model
    folder with its tokenizer: open it with AutoModelForCausalLM.from_pretrained. Logits of both models on random tokens are
    compared. A model with slots that no family has is refused.

    Example:
        >>> import normscope as ns
        >>> ns.export("builtin:addition-small-pre", progress=False)
        Traceback (most recent call last):
        ...
        normscope.errors.InputError: no family of transformers that normscope writes has positions='cyclic'; ...
    """

    command: ClassVar[str] = "export"
    title: ClassVar[str] = "Export"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope export runs/train-text-tiny-pre",
        "normscope export runs/train-text-small-peri --out models/peri",
    )

    model: Annotated[str | Path, Accepts(complete="models")] = setting(
        help="A folder that normscope train --task text wrote.", argument=True
    )

    @model_validator(mode="after")
    def _has_family(self) -> "Export":
        from normscope.transformer import TransformerConfig
        from normscope.transformer.export import family_of
        from normscope.transformer.files import model_folder, read_config

        config = TransformerConfig.of(read_config(model_folder(self.model))["model"])
        family_of(config)
        require_memory(config.memory(16))  # both models, and the weights between them
        return self

    @property
    def summary(self) -> str:
        """One line for people."""
        return str(self.model)

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Both models side by side, and the files of the new one."""
        from normscope.transformer import load_model
        from normscope.transformer.export import family_of, hugging_face_model, save_hugging_face
        from normscope.transformer.files import model_folder

        saved, source = load_model(self.model), model_folder(self.model)
        context = int(saved.about.get("recipe", {}).get("context", _CONTEXT))
        advance = progress.stage("comparing logits", 1)
        written = hugging_face_model(saved.model, context, _end_token(source))
        ours, theirs = _logits(saved.model, written, min(context, _TOKENS))
        advance(1)
        row = {
            "family": family_of(saved.model.config).name,
            "weights": sum(value.numel() for value in written.parameters()),
            "difference": float((ours - theirs).abs().max()),
            "spread": float(ours.std()),
        }
        files: dict[str, Any] = {"model.safetensors": lambda path: save_hugging_face(path.parent, written)}
        for name in _TOKENIZER:
            if (source / name).is_file():
                files[name] = partial(shutil.copyfile, source / name)
        return Result(type(self), self.record, {"families": pd.DataFrame([row])}, self.summary, files=files)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The family, and how far logits are apart."""
        return plain_rows(result.tables["families"])

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The family, and how far logits are apart."""
        (row,) = cls.records(result)
        yield (
            f"{row['family']}, {row['weights']:,} weights; logits on random tokens differ by at most {row['difference']:.1e} "
            f"(their standard deviation is {row['spread']:.2g})."
        )

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The same as a table."""
        (row,) = cls.records(result)
        cells = (row["family"], f"{row['weights']:,}", f"{row['difference']:.1e}", f"{row['spread']:.2g}")
        table = PageTable("", tuple(_COLUMNS.values()), (cells,))
        text = ("The folder of this page is the model: AutoModelForCausalLM.from_pretrained opens it.",)
        yield Section("Exported model", text, (table,), name="families")


def _end_token(source: Path) -> int | None:
    """The id of the token that ends a document, if the model has a tokenizer."""
    if not all((source / name).is_file() for name in _TOKENIZER):
        return None
    from transformers import AutoTokenizer

    end: int | None = AutoTokenizer.from_pretrained(source).eos_token_id
    return end


def _logits(model: "Transformer", written: Any, tokens: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Logits of both models on two rows of random tokens."""
    import torch

    from normscope.core import CausalMask
    from normscope.transformer import Row

    ids = torch.randint(model.config.vocabulary, (2, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(Row(ids, torch.arange(tokens)[None], CausalMask())), written(ids).logits
