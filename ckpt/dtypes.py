"""Names, sizes and safetensors codes of element types. No torch."""

from __future__ import annotations

# torch name → (bytes per element, safetensors code or None).
# Safetensors has no complex128 and no sub-byte or packed types: those are stored as bytes there,
# and the manifest names the real type.
DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "complex32": (4, None),
    "complex64": (8, None),
    "complex128": (16, None),
    "quint8": (1, None),
    "qint8": (1, None),
    "qint32": (4, None),
    "quint4x2": (1, None),
    "quint2x4": (1, None),
    "bits8": (1, None),
    "bits16": (2, None),
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    return DTYPES[dtype][0]


def safetensors_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the (code, shape) under which a safetensors header lists a tensor of this type."""
    size, code = DTYPES[dtype]
    if code is not None:
        return code, shape
    if dtype in ("complex64", "complex128", "complex32"):
        real = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}[dtype]
        return real, (*shape, 2)
    return ("U8", (*shape, size)) if size > 1 else ("U8", shape)
