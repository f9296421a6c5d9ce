"""Training: recipes, the loop, checkpoints, and what a trained model is worth."""

from normscope.training.checkpoints import Checkpoints
from normscope.training.loop import DivergedError, NotLearningError, StoppedError, Training
from normscope.training.recipe import PRESETS, Recipe, data_of, read_recipe, recipe_from, task_of

__all__ = [
    "PRESETS",
    "Checkpoints",
    "DivergedError",
    "NotLearningError",
    "Recipe",
    "StoppedError",
    "Training",
    "data_of",
    "read_recipe",
    "recipe_from",
    "task_of",
]
