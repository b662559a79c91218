"""Ways to spoil a file: bytes that are torn, and plain data whose values are of a wrong kind or far too large."""

import copy
import json
import random
import re
from typing import Any

LONG_NUMBER = "9" * 5_000
NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    LONG_NUMBER.encode(),
    b"4294967296",
    b"18446744073709551616",
    b"NaN",
    b"Infinity",
    b"-0.0",
    b"1" + b"0" * 400,
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"1e-400",
    b"0x10",
    b"07",
    b"\xd9\xa3",
)
TOKENS = (
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"\x00",
    b"\xff" * 64,
    b"\n",
    b"\r\n",
    b'"',
    b"'",
    b"\\",
    b"\\ud800",
    b"=",
    b":",
    b"\xef\xbb\xbf",
    b"\x1b[31m",
    b"\xe2\x80\xae",
    b"../../../etc/passwd",
    b"%s%n",
    b"a." * 20_000,
    b",",
    b"#",
    b"$(",
    b"/*",
    b"&a [*a]",
    b"!!python/object:os.system",
    b"slots=",
    b"--",
    b"\xf0\x9f\x98\x80",
    b" " * 70_000,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    -(10**18),
    0.5,
    1e300,
    -1e-300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[31m\u202e",
    "\0",
    "a\nb",
    "9" * 5_000,
    "../../x",
    "名" * 100,
    "file.py:Net",
    "1e400",
    [],
    {},
    [[]],
    [None],
    {"": {}},
    ["x"] * 50,
    [0] * 1_000,
    {"a": {"b": {"c": [1]}}},
)


def spoil_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to four changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = bytearray(rng.choice(_BYTE_WAYS)(bytes(data), rng))
    return bytes(data)


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 100)) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 8, 100, 2_000))
    return data[: at + length] + data[at : at + length] * rng.choice((1, 2, 50)) + data[at + length :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _number(data: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"\d+(\.\d+)?", data[:200_000]))
    if not found:
        return _flip(data, rng)
    chosen = rng.choice(found)
    return data[: chosen.start()] + rng.choice(NUMBERS) + data[chosen.end() :]


def _word(data: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"[A-Za-z_][\w.]*", data[:200_000]))
    if len(found) < 2:
        return _flip(data, rng)
    one, other = rng.choice(found), rng.choice(found)
    return data[: one.start()] + rng.choice((other[0], rng.choice(TOKENS), b"")) + data[one.end() :]


def _wide(data: bytes, rng: random.Random) -> bytes:
    """A length or a count of two, four or eight bytes becomes a huge one."""
    at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(64, len(data) + 1))
    value = rng.choice(
        (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\xff\xff")
    )
    return data[:at] + value + data[at + len(value) :]


def _empty(_data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"\n", b"{}", b"[]", b"null", b"0", b"\x00" * 4_096))


_BYTE_WAYS = (_flip, _flip, _cut, _remove, _repeat, _insert, _insert, _number, _number, _word, _word, _wide, _empty)


def spoil_json(content: bytes, rng: random.Random) -> bytes:
    """JSON with one to three of its values replaced, left out or moved; what isn't JSON is spoilt as bytes."""
    try:
        tree = json.loads(content)
    except ValueError:
        return spoil_bytes(content, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = spoil_tree(tree, rng)
    return json.dumps(tree).encode()


def spoil_tree(tree: Any, rng: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """Plain data with one value replaced, left out or moved."""
    places = list(_places(tree))
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(values))
    holder, key = rng.choice(places)
    way = rng.random()
    if way < 0.6:
        holder[key] = copy.deepcopy(rng.choice(values))
    elif way < 0.75:
        del holder[key]
    elif way < 0.9:
        other, there = rng.choice(places)
        # Written out, so that nothing ever holds itself.
        holder[key] = json.loads(json.dumps(other[there], default=str)) if _is_there(other, there) else None
    elif isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(values)))
    else:
        holder[rng.choice(("", "x", "\x1b[31m", "a.b", "0", "-1", "9" * 300))] = holder.pop(key)
    return tree


def _is_there(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(tree: Any) -> Any:
    """(holder, key) of every value in plain data."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
