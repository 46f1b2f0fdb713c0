"""What an export can be; imports no numpy, because declarations of graphs read it."""

from __future__ import annotations

from pipeline.errors import InputError

DTYPES = ("bfloat16", "float32")
PARAMETERS = ("ema", "last")
GGUF_DTYPES = ("f16", "bf16", "q8_0", "f32")
"""llama.cpp's names; q8_0 has blocks of 32 integers of 8 bits with one scale per block."""

OTHER_TOKENIZER = (
    "train with Qwen2's tokenizer or without qkv_biases, or set auto_tokenizer=False for programs "
    "that read tokenizer.json themselves, such as llama.cpp"
)


def check_choices(owner: str, dtype: str, parameters: str) -> None:
    """Raise `InputError` for a dtype or parameters that an export cannot have."""
    for name, value, known in (("dtype", dtype, DTYPES), ("parameters", parameters, PARAMETERS)):
        if value not in known:
            raise InputError(
                f"{owner}.{name}: expected {' or '.join(known)}, found {value!r}; give one of them"
            )
