"""The configuration of a model, as experiments import it: no JAX."""

from models.shape.config import RopeScaling, TransformerConfig, YarnScaling

__all__ = ["RopeScaling", "TransformerConfig", "YarnScaling"]
