"""Published recipes as whole configurations: model, optimizer, batches and length. No JAX."""

from training.recipes.nanochat import nanochat as nanochat
from training.recipes.published import llama as llama
from training.recipes.published import marin_qwen3 as marin_qwen3
from training.recipes.published import speedrun as speedrun
from training.recipes.published import tuned_muon as tuned_muon
from training.recipes.recipe import Recipe as Recipe
