"""How much memory training and testing need, from a recipe alone: about, to a factor of two."""

import math

from normscope.training.recipe import Recipe
from normscope.training.tasks import AdditionTask
from normscope.transformer import TransformerConfig

EXAMPLES_A_BLOCK = {"cpu": 2048, "cuda": 1 << 16}  # drawn at a time
CALIBRATED_ON = 128
TESTED_AT_A_TIME = {"cpu": 512, "cuda": 8192}
DRAWN_FOR_A_TEST = 16_384
_WEIGHT = 20  # bytes: the weight, its gradient, two averages, and copies of the largest matrices
DRAWN = 96  # bytes of a character while examples are drawn: a dozen 64-bit arrays
_CHARACTER = 24  # bytes of a character's one-hot vector and its logits, for each character of the vocabulary
_SCORE = 22  # bytes of a score while scales are calibrated
_METRICS = 500  # bytes of a row of metrics, as an object and in a table


def training_memory(recipe: Recipe, device: str) -> dict[str, float]:
    """Bytes of a training by the keys of the recipe that they follow from; of its calibration and tests, if those are more."""
    kind, model, task = device.partition(":")[0], recipe.model, recipe.task
    longest, blocks = task.train.longest, model.layers + model.encoder_layers
    stored = 4 * blocks * (9 * model.dim + 7 * model.heads * model.head + 2 * model.feedforward)
    batch = recipe.batch * longest * (stored + _CHARACTER * model.vocabulary)
    drawn = max(recipe.batch, EXAMPLES_A_BLOCK[kind]) * longest * DRAWN
    rows = math.ceil(recipe.examples / max(recipe.batch, EXAMPLES_A_BLOCK[kind]))
    training = {**model.memory(_WEIGHT), f"batch={recipe.batch}": batch + drawn, f"examples={recipe.examples}": rows * _METRICS}
    scores = CALIBRATED_ON * model.heads * longest**2 * _SCORE if recipe.calibrate else 0
    calibration = {f"integers={list(recipe.integers)}, digits={list(recipe.digits)}, heads={recipe.heads}": float(scores)}
    others = (
        {**model.memory(4), **calibration},
        {**model.memory(_WEIGHT), **testing_memory(model, task, recipe.test_examples, kind)},
    )
    return max(training, *others, key=lambda needs: sum(needs.values()))


def testing_memory(model: TransformerConfig, task: AdditionTask, examples: int, device: str) -> dict[str, float]:
    """Bytes of the examples of a test and of one block's activations, beside the model itself."""
    kind, longest = device.partition(":")[0], max(split.longest for split in task.splits.values())
    active = 4 * (4 * model.dim + 3 * model.heads * model.head + model.feedforward) + _CHARACTER * model.vocabulary
    drawn, tested = min(examples, DRAWN_FOR_A_TEST) * DRAWN, min(examples, TESTED_AT_A_TIME[kind]) * active
    return {f"examples of up to {longest} characters": float(longest * (drawn + tested))}
