"""Encode plain values as typed, versioned JSON that decodes to the same values and never to code.

`["ftplain", 1, VALUE]`: None, bool, str, small int, finite float and list are themselves;
everything else is an object with one key, the type: `{"tuple": [1, 2]}`,
`{"dict": [[1, "one"]]}`. Types of users exist only through `register_type`.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ftcore.statedict.errors import CannotStore, PlainEncodingInvalid

VERSION = 1
BYTES_MAX = 256 << 20
DEPTH_MAX = 100  # containers inside containers; also keeps the JSON scanner off the C stack's end
_JSON_INT_MAX = 1 << 63  # beyond, hexadecimal: decimal conversion is quadratic
_NUMPY_DTYPE = re.compile(r"[<>|][biufc](1|2|4|8|16)")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands where a tensor was: its bytes travel apart, under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Registered:
    tag: str
    to_plain: Callable[[Any], object]
    from_plain: Callable[[Any], object]


_by_type: dict[type, _Registered] = {}
_by_tag: dict[str, _Registered] = {}


T = TypeVar("T")


def register_type(
    cls: type[T],
    *,
    tag: str,
    to_plain: Callable[[T], object],
    from_plain: Callable[[Any], T],
) -> None:
    """Store values of exactly `cls` as `to_plain(value)`; both sides register the same `tag`."""
    if tag in _by_tag and _by_type.get(cls) is not _by_tag[tag]:
        raise CannotStore(
            f"the tag {tag!r} of {cls.__name__} is taken by another type",
            remedy="Choose another tag; a package name in front keeps it unique.",
        )
    _by_type[cls] = _by_tag[tag] = _Registered(tag, to_plain, from_plain)


def encode(value: object, *, path: str = "") -> bytes:
    """Bytes of a plain value. Raises CannotStore, naming the path, for a type it does not know."""
    document = ["ftplain", VERSION, _to_json(value, path, 0)]
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def decode(data: bytes | bytearray | memoryview, *, bytes_max: int = BYTES_MAX) -> Any:
    """The value that `encode` was given. Any other bytes raise PlainEncodingInvalid."""
    if len(data) > bytes_max:
        raise PlainEncodingInvalid(
            f"{len(data)} bytes of plain values are more than the limit of {bytes_max}"
        )
    try:
        text = bytes(data).decode("utf-8", "surrogatepass")
        document = json.loads(
            text,
            object_pairs_hook=_from_pairs,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except PlainEncodingInvalid:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, struct.error) as error:
        raise PlainEncodingInvalid(f"plain values cannot be read: {error}") from error
    if not isinstance(document, list) or len(document) != 3 or document[0] != "ftplain":
        raise PlainEncodingInvalid("these bytes are not an encoding of plain values")
    if document[1] != VERSION or document[1] is True:
        raise PlainEncodingInvalid(
            f"plain values of version {document[1]!r}; this ftcore reads version {VERSION}"
        )
    return document[2]


def _to_json(value: object, path: str, depth: int) -> object:
    if depth > DEPTH_MAX:
        raise CannotStore(f"{path or 'the state'} is nested deeper than {DEPTH_MAX} levels")
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value, path, depth + 1)
    if type(value) in _by_type:
        registered = _by_type[type(value)]
        inner = _to_json(registered.to_plain(value), path, depth + 1)
        return {"object": [registered.tag, inner]}
    if isinstance(value, np.generic):
        return {"scalar": _array(np.asarray(value), path)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CannotStore(f"{path or 'the state'} is a {kind}, which cannot be stored", path=path)


def _int(value: int, path: str, depth: int) -> object:
    return value if abs(value) < _JSON_INT_MAX else {"int": hex(value)}


def _float(value: float, path: str, depth: int) -> object:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _items(values: Any, path: str, depth: int) -> list[object]:
    return [_to_json(item, join(path, i), depth) for i, item in enumerate(values)]


def _pairs(mapping: Any, path: str, depth: int) -> list[object]:
    return [
        [
            key if type(key) is str else _to_json(key, f"{path} key {key!r}", depth),
            _to_json(item, join(path, key), depth),
        ]
        for key, item in mapping.items()
    ]


def _set(values: Any, path: str, depth: int) -> list[object]:
    return sorted(_items(values, path, depth), key=lambda item: json.dumps(item))


def _array(array: np.ndarray[Any, Any], path: str, depth: int = 0) -> list[object]:
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise CannotStore(f"{path} is a numpy array of {array.dtype}, which cannot be stored")
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def join(path: str, key: object) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else f"{key}"


_WRITERS: dict[type, Callable[[Any, str, int], object]] = {
    type(None): lambda value, path, depth: None,
    bool: lambda value, path, depth: value,
    str: lambda value, path, depth: value,
    int: _int,
    float: _float,
    list: _items,
    tuple: lambda value, path, depth: {"tuple": _items(value, path, depth)},
    dict: lambda value, path, depth: {"dict": _pairs(value, path, depth)},
    OrderedDict: lambda value, path, depth: {"odict": _pairs(value, path, depth)},
    Counter: lambda value, path, depth: {"counter": _pairs(value, path, depth)},
    set: lambda value, path, depth: {"set": _set(value, path, depth)},
    frozenset: lambda value, path, depth: {"frozenset": _set(value, path, depth)},
    bytes: lambda value, path, depth: {"bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, path, depth: {"bytearray": base64.b64encode(value).decode()},
    complex: lambda value, path, depth: {
        "complex": struct.pack(">dd", value.real, value.imag).hex()
    },
    torch.Size: lambda value, path, depth: {"size": list(value)},
    torch.dtype: lambda value, path, depth: {"dtype": dtype_name(value)},
    torch.device: lambda value, path, depth: {"device": str(value)},
    np.ndarray: lambda value, path, depth: {"array": _array(value, path)},
    TensorRef: lambda value, path, depth: {"tensor": value.name},
}


def _from_pairs(pairs: list[tuple[str, Any]]) -> object:
    if len(pairs) != 1 or pairs[0][0] not in _READERS:
        names = [name for name, _ in pairs]
        raise PlainEncodingInvalid(f"plain values hold an object of unknown kind {names!r:.80}")
    name, payload = pairs[0]
    return _READERS[name](payload)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is too large for a float")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not written as a plain value")


def _typed(payload: Any, *kinds: type) -> Any:
    """`payload` as a list of values of exactly these types; ValueError otherwise."""
    if type(payload) is not list or tuple(map(type, payload)) != kinds:
        raise ValueError("an object has a payload of the wrong shape")
    return payload


def _text(payload: Any) -> str:
    if type(payload) is not str:
        raise ValueError("an object has a payload that is not text")
    return payload


def _sequence(payload: Any) -> list[Any]:
    if type(payload) is not list:
        raise ValueError("an object has a payload that is not a list")
    return payload


def _read_pairs(payload: Any) -> list[tuple[Any, Any]]:
    if any(type(pair) is not list or len(pair) != 2 for pair in _sequence(payload)):
        raise ValueError("a dict holds something that is not a pair")
    return [(key, value) for key, value in payload]


def _read_bytes(payload: Any) -> bytes:
    return base64.b64decode(_text(payload), validate=True)


def _read_array(payload: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = _typed(payload, str, list, str)
    if not _NUMPY_DTYPE.fullmatch(dtype) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("an array has an unknown dtype or an impossible shape")
    array: np.ndarray[Any, Any] = np.frombuffer(_read_bytes(text), dtype=np.dtype(dtype))
    return array.reshape(shape).copy()


def _read_size(payload: Any) -> torch.Size:
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in _sequence(payload)):
        raise ValueError("a torch.Size holds something that is not a size")
    return torch.Size(payload)


def _read_object(payload: Any) -> object:
    if type(payload) is not list or len(payload) != 2 or _text(payload[0]) not in _by_tag:
        raise PlainEncodingInvalid(
            f"plain values hold an object of a type that is not registered here: {payload!r:.80}"
        )
    try:
        return _by_tag[payload[0]].from_plain(payload[1])
    except Exception as error:  # code of the user, fed with bytes from outside
        raise PlainEncodingInvalid(f"a {payload[0]} cannot be made from its bytes") from error


def _read_device(payload: Any) -> torch.device:
    try:
        return torch.device(_text(payload))
    except RuntimeError as error:
        raise ValueError(f"no device is called {payload!r:.40}") from error


def _read_complex(payload: Any) -> complex:
    real, imag = struct.unpack(">dd", bytes.fromhex(_text(payload)))
    return complex(real, imag)


_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; ValueError when this torch has none."""
    if name not in _DTYPES:
        raise ValueError(f"this torch has no dtype {name!r:.40}")
    return _DTYPES[name]


_READERS: dict[str, Callable[[Any], object]] = {
    "int": lambda payload: int(_text(payload), 16),
    "float": lambda payload: struct.unpack(">d", bytes.fromhex(_text(payload)))[0],
    "tuple": lambda payload: tuple(_sequence(payload)),
    "dict": lambda payload: dict(_read_pairs(payload)),
    "odict": lambda payload: OrderedDict(_read_pairs(payload)),
    "counter": lambda payload: Counter(dict(_read_pairs(payload))),
    "set": lambda payload: set(_sequence(payload)),
    "frozenset": lambda payload: frozenset(_sequence(payload)),
    "bytes": _read_bytes,
    "bytearray": lambda payload: bytearray(_read_bytes(payload)),
    "complex": _read_complex,
    "size": _read_size,
    "dtype": lambda payload: dtype_of(_text(payload)),
    "device": _read_device,
    "array": _read_array,
    "scalar": lambda payload: _read_array(payload)[()],
    "tensor": lambda payload: TensorRef(_text(payload)),
    "object": _read_object,
}
