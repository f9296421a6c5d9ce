"""How much memory training and testing need, from a recipe alone: about, to a factor of two."""

import math

import torch

from normscope.training.recipe import Recipe, precision_of
from normscope.training.tasks import Task
from normscope.transformer import TransformerConfig

_WEIGHT = 20  # bytes: the weight, its gradient, two averages, and copies of the largest matrices
_TOKEN = 24  # bytes of a token's one-hot vector and its logits, for each token of the vocabulary
_SCORE = 22  # bytes of a score while scales are calibrated
_METRICS = 500  # bytes of a row of metrics, as an object and in a table


def training_memory(recipe: Recipe, device: str) -> dict[str, float]:
    """Bytes of a training by the keys of the recipe that they follow from; of its calibration and tests, if those are more."""
    kind, model, task = device.partition(":")[0], recipe.model, recipe.data
    blocks, drawn = model.layers + model.encoder_layers, max(recipe.batch, task.block(kind))
    stored = 4 * blocks * (9 * model.dim + 7 * model.heads * model.head + 2 * model.feedforward)
    half = precision_of(recipe.precision, torch.device(device)) == torch.bfloat16
    batch = recipe.batch * task.longest * (stored + _TOKEN * model.vocabulary) / (2 if half else 1)
    rows = math.ceil(recipe.examples / drawn)
    training = {
        **model.memory(_WEIGHT),
        f"batch={recipe.batch}": batch + task.drawn_bytes(drawn),
        f"examples={recipe.examples}": rows * _METRICS,
    }
    scores = task.calibrated * model.heads * task.longest**2 * _SCORE if recipe.calibrate else 0
    calibration = {f"{recipe.named(task.sized)}, heads={recipe.heads}": float(scores)}
    others = (
        {**model.memory(4), **calibration},
        {**model.memory(_WEIGHT), **testing_memory(model, task, recipe.test_examples, kind)},
    )
    return max(training, *others, key=lambda needs: sum(needs.values()))


def testing_memory(model: TransformerConfig, task: Task, examples: int, device: str) -> dict[str, float]:
    """Bytes of the examples of a test and of one block's activations, beside the model itself."""
    longest, (drawn, read) = task.longest_tested, task.tested(device.partition(":")[0])
    active = 4 * (4 * model.dim + 3 * model.heads * model.head + model.feedforward) + _TOKEN * model.vocabulary
    needed = task.drawn_bytes(min(examples, drawn)) + min(examples, read) * longest * active
    return {f"examples of up to {longest} tokens": needed}
