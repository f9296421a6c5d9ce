"""The Hugging Face Trainer on a small GPT-2 or Llama.

python examples/watch_hugging_face.py [--model llama]; one line is that of the watch: ``ns.watch.TrainerCallback(...)``.
"""

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


def train(output: str, steps: int, name: str = "gpt2", every: int = 10, watched: bool = True, **options: object) -> Trainer:
    """Train a small model on the help pages of Python; what the watch shows is in ``<output>/watch``."""
    set_seed(0)
    pieces = shared.tokens()[: 512 * shared.CONTEXT].view(-1, shared.CONTEXT)
    arguments = TrainingArguments(
        output, max_steps=steps, learning_rate=1e-3, logging_steps=every, logging_first_step=True, report_to="none",
        use_cpu=True, disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Trainer(
        build(name),
        arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        callbacks=[ns.watch.TrainerCallback(every=every)] if watched else [],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = shared.parser(__doc__, to="runs/hugging-face/watch", steps=60)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    given = parser.parse_args()
    train("runs/hugging-face", given.steps, given.model)
    shared.show("runs/hugging-face/watch")
