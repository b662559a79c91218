"""The types of tensors' values that files hold, by name: what can be said of a tensor without torch."""

from typing import NamedTuple


class ElementType(NamedTuple):
    """The type of one value, as torch calls it: float32."""

    name: str
    item_bytes: int


# By the names that the .safetensors format gives them.
BY_CODE = {
    "F64": ElementType("float64", 8),
    "F32": ElementType("float32", 4),
    "F16": ElementType("float16", 2),
    "BF16": ElementType("bfloat16", 2),
    "F8_E4M3": ElementType("float8_e4m3fn", 1),
    "F8_E5M2": ElementType("float8_e5m2", 1),
    "F8_E4M3FNUZ": ElementType("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ElementType("float8_e5m2fnuz", 1),
    "F8_E8M0": ElementType("float8_e8m0fnu", 1),
    "C64": ElementType("complex64", 8),
    "I64": ElementType("int64", 8),
    "I32": ElementType("int32", 4),
    "I16": ElementType("int16", 2),
    "I8": ElementType("int8", 1),
    "U64": ElementType("uint64", 8),
    "U32": ElementType("uint32", 4),
    "U16": ElementType("uint16", 2),
    "U8": ElementType("uint8", 1),
    "BOOL": ElementType("bool", 1),
}
BY_NAME = {kind.name: kind for kind in BY_CODE.values()}
