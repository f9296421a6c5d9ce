"""The Hugging Face Trainer on a small GPT-2 or Llama.

python examples/watch_hugging_face.py [--model llama]; one line is that of the watch: ``ns.watch.TrainerCallback(...)``.
"""

from typing import Any

import shared
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import normscope as ns


def build(name: str) -> PreTrainedModel:
    """A small model with random weights."""
    ends = {"bos_token_id": None, "eos_token_id": None, "vocab_size": shared.VOCABULARY}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_positions=shared.CONTEXT, n_embd=64, n_layer=4, n_head=4, **ends))
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, attention_dropout=0.1, **ends))


def train(to: str | None, steps: int, name: str = "gpt2", every: int = 10, **options: Any) -> Trainer:
    """Train a small model on the help pages of Python; without a watch if ``to`` is None."""
    set_seed(0)
    pieces = shared.tokens()[: 512 * shared.CONTEXT].view(-1, shared.CONTEXT)
    settings = {
        "output_dir": "runs/trainer", "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "max_steps": steps, "learning_rate": 1e-3, "logging_steps": every, "logging_first_step": True,
    }  # fmt: skip
    trainer = Trainer(
        build(name),
        TrainingArguments(**{**settings, **options}),
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        callbacks=[] if to is None else [ns.watch.TrainerCallback(every=every, to=to)],
    )
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> None:
    """Train, and show the page."""
    options = shared.options(__doc__, to="runs/hugging-face")
    options.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    given = options.parse_args(arguments)
    train(given.to, given.steps, given.model)
    shared.show(given.to)


if __name__ == "__main__":
    main()
