"""The steps of these tests train in this process, many times the same tiny models."""

from tests.training.conftest import cheap_compilation as cheap_compilation
