"""Training: recipes, the loop, checkpoints, and what a trained model is worth."""

from normscope.training.checkpoints import Checkpoints
from normscope.training.evaluation import Evaluation, evaluate
from normscope.training.loop import DivergedError, Training
from normscope.training.recipe import PRESETS, Recipe, read_recipe, recipe_from

__all__ = [
    "PRESETS",
    "Checkpoints",
    "DivergedError",
    "Evaluation",
    "Recipe",
    "Training",
    "evaluate",
    "read_recipe",
    "recipe_from",
]
