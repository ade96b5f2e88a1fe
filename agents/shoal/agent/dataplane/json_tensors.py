"""Converts tensors between JSON text and packed bytes, in steps of about a millisecond of a small core.

A JSON parser holds the interpreter's lock while it runs, and makes an object of some 32 bytes of every number.
So the text of a body is never parsed whole: `split` finds the `data` arrays without parsing them. `pack` converts an
array a piece at a time, directly to the bytes of its tensor. Every generator here yields between steps, so that its
caller decides what runs meanwhile.
"""

import io
import json
import re
import secrets
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from shoal.agent.dataplane.request import invalid, too_large
from shoal.types.codes import Code, ShoalError, refuse

STEP_BYTES: Final = 16 * 2**10
"""Bytes of strings converted in one step. A number, with the space around it, is no longer."""
STEPS_OF_NUMBERS: Final = 4
"""Times as many bytes of numbers are converted in one step: 90 us of a server's core where they have 17 digits, three
times as much where they have one (measured)."""
MAX_HEAD_BYTES: Final = 2**20
"""Bytes of JSON without the tensors' elements: the same as a gRPC message has room for in addition to its tensors."""
MAX_HEAD_VALUES: Final = 2**14
"""Keys, values and elements in that JSON; a model with 160 inputs, all also named as outputs, takes some 4,000."""
MAX_STRING_BYTES: Final = 4 * 2**20
"""Bytes of one string, which is parsed in one step, at some 40 ns a byte on a small core."""

FORMATS: Final[Mapping[str, str]] = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_INTEGERS: Final = frozenset({int})
_NUMBERS: Final = frozenset({int, float})
ITEM_TYPES: Final[Mapping[str, frozenset[type]]] = {
    **{name: _NUMBERS if name.startswith("FP") else _INTEGERS for name in FORMATS},
    "BOOL": frozenset({bool}),
    "BYTES": frozenset({str}),
}
_LENGTH: Final = struct.Struct("<I")
_STRINGS_A_STEP: Final = 512
_ITEMS_A_STEP: Final = 4096

_SPACE: Final = b" \t\r\n"
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN: Final = re.compile(_STRING, re.DOTALL)
_TO_ARRAY: Final = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+(?=\[)")
_NESTED: Final = re.compile(rb"\[[ \t\r\n]*+\[")
_NOTHING: Final = re.compile(rb"\[[ \t\r\n]*+\]")
_OF_STRINGS: Final = re.compile(rb'\[[ \t\r\n\[]*+"')
_ELEMENT: Final = rb"[ \t\r\n,\[\]]*+" + _STRING + rb"(?=[ \t\r\n]*+[,\]])"
"""A string of an array with the punctuation before it. A key does not match, because a colon follows it."""
_ONE_STRING: Final = re.compile(_ELEMENT, re.DOTALL)
_STRINGS: Final = re.compile(b"(?:" + _ELEMENT + b"){1,4096}+", re.DOTALL)
_PUNCTUATION: Final = re.compile(rb"[ \t\r\n,\[\]]*+")
_CLOSING: Final = re.compile(rb"[ \t\r\n\]]*+")
_VALUES_TO_0: Final = bytes(byte if byte in b"[]," else 0x30 for byte in range(256))
_BRACKETS_TO_SPACE: Final = bytes(0x20 if byte in b"[]" else byte for byte in range(256))
_NEVER_VALID: Final = (b"0[", b"]0", b",,", b"[,", b",]", b"][", b"[]")
"""Substrings that the outline of a valid non-empty JSON array never contains."""


@dataclass(frozen=True, slots=True)
class Split:
    """A body without the elements of its tensors."""

    # JSON with a string, a key of `data`, in place of each array under a key "data".
    head: bytes
    # Position of each array in the body, brackets included.
    data: Mapping[str, tuple[int, int]]


class Body:
    """The bytes of a body. Converted bytes can be released, so that text and tensors are not held both."""

    def __init__(self, content: bytearray) -> None:
        self.content = content
        self._released = 0

    def find(self, what: bytes, start: int, end: int) -> int:
        return self._position(self.content.find(what, start - self._released, end - self._released))

    def rfind(self, what: bytes, start: int, end: int) -> int:
        return self._position(self.content.rfind(what, start - self._released, end - self._released))

    def match(self, pattern: re.Pattern[bytes], start: int, end: int) -> int:
        """Where the match that begins at `start` ends; -1 without one."""
        found = pattern.match(self.content, start - self._released, end - self._released)
        return -1 if found is None else found.end() + self._released

    def read(self, start: int, end: int) -> bytes:
        with memoryview(self.content) as content:
            return bytes(content[start - self._released : end - self._released])

    def copy(self, start: int, end: int) -> bytearray:
        return self.content[start - self._released : end - self._released]

    def release(self, until: int) -> None:
        """Declare that nothing before `until` is read again. Bytes are freed in large pieces, because each time costs a
        copy."""
        if until - self._released >= 2**20:
            del self.content[: until - self._released]
            self._released = until

    def _position(self, found: int) -> int:
        return found if found < 0 else found + self._released


def split(body: Body, end: int) -> Generator[None, None, Split]:
    """Split the body, whose JSON ends at `end`. Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE | FIELD_TOO_MANY)."""
    mark = secrets.token_hex(8)
    head: list[bytes] = []
    data: dict[str, tuple[int, int]] = {}
    at = copied = size = tokens = 0
    while (start := body.find(b'"', at, end)) >= 0:
        if (at := body.match(_TOKEN, start, min(end, start + MAX_HEAD_BYTES))) < 0:
            break
        tokens += 1
        if tokens % 1024 == 0:
            yield
        _check_head(size + at - copied, tokens)
        begin = -1 if at - start != 6 else body.match(_TO_ARRAY, at, min(end, at + STEP_BYTES))
        if begin >= 0 and body.read(start, at) == b'"data"':
            at = yield from _end_of_array(body, begin, end)
            name = f"{mark}:{len(data)}"
            head += [body.read(copied, begin), f'"{name}"'.encode()]
            size += begin - copied
            data[name], copied = (begin, at), at
    _check_head(size + end - copied, tokens)
    head.append(body.read(copied, end))
    return Split(b"".join(head), data)


def _check_head(size: int, tokens: int) -> None:
    if size > MAX_HEAD_BYTES:
        raise refuse(
            Code.TOO_LARGE,
            f"{size} bytes of JSON beside `data` of tensors",
            f"at most {MAX_HEAD_BYTES}",
            "send tensors in `data` of inputs, or by the binary tensor extension",
        )
    if tokens > MAX_HEAD_VALUES:
        raise too_many(f"{tokens} strings beside `data` of tensors", MAX_HEAD_VALUES)


def _end_of_array(body: Body, begin: int, end: int) -> Generator[None, None, int]:
    """Position after the array's last bracket, as far as known without parsing; `pack` checks what is inside."""
    near = min(end, begin + STEP_BYTES)
    if body.match(_OF_STRINGS, begin, near) >= 0:
        at = begin
        while (after := _after_strings(body, at, end)) >= 0:
            at = after
            yield
        quote = body.match(_PUNCTUATION, at, end)
        limit = at + MAX_STRING_BYTES
        if limit < end and body.read(quote, quote + 1) == b'"' and body.match(_TOKEN, quote, limit) < 0:
            raise too_large(f"a string of over {MAX_STRING_BYTES} bytes in JSON, or without an end", MAX_STRING_BYTES)
        stop = body.rfind(b"]", at, body.match(_CLOSING, at, end)) + 1
    elif body.match(_NESTED, begin, near) >= 0:
        # The array has no string, so the next quote is that of the next key.
        quote = body.find(b'"', begin, end)
        limit = end if quote < 0 else quote
        brace = body.find(b"}", begin, limit)
        stop = body.rfind(b"]", begin, limit if brace < 0 else brace) + 1
    else:
        stop = body.find(b"]", begin, end) + 1
    if stop <= begin:
        raise invalid("`data` that is no list of numbers, booleans or strings", "one list, flat or nested as its shape")
    return stop


def outline(text: bytes) -> bytes:
    """The JSON with a 0 in place of each string."""
    return _TOKEN.sub(b"0", text)


def too_many(found: str, most: int) -> ShoalError:
    return refuse(
        Code.FIELD_TOO_MANY, found, f"at most {most}", "send fewer, or tensors by the binary tensor extension"
    )


def pack(
    body: Body, span: tuple[int, int], name: str, datatype: str, shape: Sequence[int], count: int, into: io.BytesIO
) -> Generator[None, None, None]:
    """Append the little-endian bytes of a JSON tensor, flat or nested as its shape. `count` is the product of `shape`.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    begin, end = span
    if datatype == "BF16":
        raise invalid(f"input {name!r:.80}: BF16 in JSON", "the binary tensor extension, which carries it exactly")
    if count == 0:
        _check_empty(body, span, name, shape)
        return
    texts: Iterator[bytes | bytearray | None]
    nested = len(shape) > 1 and body.match(_NESTED, begin, min(end, begin + STEP_BYTES)) >= 0
    if datatype == "BYTES":
        texts = _as_outlined(_strings_in(body, begin, end), _Outline(shape if nested else (count,), _is_never_valid))
    elif nested:
        texts = _as_outlined(_numbers_in_lists(body, begin, end, name), _Outline(shape, _has_wrong_brackets))
    else:
        texts = _numbers_in(body, begin, end, name)
    found = 0
    for text in texts:
        items = [] if text is None else _parse(text, name)
        found += len(items)
        if text is None or found > count:
            raise _shape_mismatch(name, shape, count, nested)
        into.write(pack_items(items, name, datatype, text))
        yield
    if found != count:
        raise _shape_mismatch(name, shape, count, nested)


def _numbers_in(body: Body, begin: int, end: int, name: str) -> Iterator[bytearray | None]:
    """Pieces of one flat list of numbers, each as a list in JSON; None where a piece has nothing. Lists inside make a
    piece that is no JSON, or has an element that is no number."""
    for at, cut in _cuts_in(body, begin + 1, end, name):
        piece = body.copy(at - 1, cut)
        piece[0], piece[-1] = b"[]"  # in place of the commas around it
        yield None if _NOTHING.fullmatch(piece) else piece


def _numbers_in_lists(body: Body, begin: int, end: int, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Pieces of lists of numbers as (flat list in JSON, outline)."""
    for at, cut in _cuts_in(body, begin, end, name):
        piece, comma = (body.read(at, cut), b"") if cut == end else (body.read(at, cut - 1), b",")
        yield b"[%b]" % piece.translate(_BRACKETS_TO_SPACE), piece.translate(_VALUES_TO_0, _SPACE) + comma


def _cuts_in(body: Body, begin: int, end: int, name: str) -> Iterator[tuple[int, int]]:
    """Where pieces of numbers begin and end, each but the last with the comma after it."""
    at = begin
    while at < end:
        cut = at
        while cut < end and cut - at <= (STEPS_OF_NUMBERS - 1) * STEP_BYTES:
            stop = end if end - cut <= STEP_BYTES else body.rfind(b",", cut, cut + STEP_BYTES) + 1
            if stop <= cut:
                found = f"{STEP_BYTES} bytes of input {name!r:.80} without a comma"
                raise invalid(found, "shorter numbers, or less space")
            cut = stop
        yield at, cut
        at = cut
        body.release(at - 1)


def _strings_in(body: Body, begin: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Pieces of an array of strings as (flat list in JSON, outline)."""
    at = begin
    while at < end:
        after = _after_strings(body, at, end)
        cut = end if after < 0 else after
        piece = body.read(at, cut)
        at = cut
        body.release(at)
        shown = _TOKEN.sub(b"0", piece).translate(None, _SPACE)
        if b"00" in shown or shown.translate(None, b"0,[]"):
            shown = b"][" + shown  # not valid JSON: `_Outline.accept` rejects this
        yield b"[%b]" % b",".join(_TOKEN.findall(piece)), shown


def _as_outlined(pieces: Iterable[tuple[bytes, bytes]], outline: "_Outline") -> Iterator[bytes | None]:
    """The lists, while they are those of the outline; then None."""
    for text, shown in pieces:
        yield text if outline.accept(shown) else None
    if not outline.is_complete():
        yield None


def _after_strings(body: Body, at: int, end: int) -> int:
    """Where a step's strings end; -1 if no string comes next."""
    after = body.match(_STRINGS, at, min(end, at + STEP_BYTES))
    return after if after >= 0 else body.match(_ONE_STRING, at, min(end, at + MAX_STRING_BYTES))


class _Outline:
    """The brackets and commas of a list of a given shape, compared piece by piece with those of the input."""

    def __init__(self, shape: Sequence[int], is_wrong: Callable[[bytes], bool]) -> None:
        """is_wrong: whether a part of the input's outline is that of no valid array."""
        self._pieces = _outline_of(shape)
        self._is_wrong = is_wrong
        self._ahead = b""
        self._last = b""

    def accept(self, shown: bytes) -> bool:
        """Whether the next piece matches. `shown` is its outline, with one or more 0 for each value."""
        near = self._last + shown
        if self._is_wrong(near):
            return False
        self._last = near[-1:]
        found = shown.translate(None, b"0")
        while len(self._ahead) < len(found) and (piece := next(self._pieces, b"")):
            self._ahead += piece
        as_said = self._ahead.startswith(found)
        self._ahead = self._ahead[len(found) :]
        return as_said

    def is_complete(self) -> bool:
        return not self._ahead and not next(self._pieces, b"")


def _is_never_valid(outline: bytes) -> bool:
    return any(wrong in outline for wrong in _NEVER_VALID)


def _has_wrong_brackets(outline: bytes) -> bool:
    """As `_is_never_valid`, where a parser took the values and the commas between them: then a bracket can only be on
    the wrong side of a value, or of another bracket. Searching for two characters, one of which is everywhere, took
    half of the time of a conversion."""
    before, after = outline.split(b"["), outline.split(b"]")
    del before[-1], after[0]
    return any(part.endswith((b"0", b"]")) for part in before) or any(part.startswith(b"0") for part in after)


def _outline_of(shape: Sequence[int]) -> Iterator[bytes]:
    """The outline in pieces of at most about STEP_BYTES. No dimension of `shape` is 0."""
    yield b"["
    left = shape[0] - 1
    inner = b"" if len(shape) == 1 else _small_outline(shape[1:])
    if inner is None:
        yield from _outline_of(shape[1:])
        for _ in range(left):
            yield b","
            yield from _outline_of(shape[1:])
    else:
        if inner:
            yield inner
        at_once = max(1, STEP_BYTES // (len(inner) + 1))
        while left > 0:
            yield (b"," + inner) * min(left, at_once)
            left -= at_once
    yield b"]"


def _small_outline(shape: Sequence[int]) -> bytes | None:
    """The whole outline if it is no longer than STEP_BYTES; else None."""
    size = 0
    for length in reversed(shape):
        size = 1 + length * (size + 1)
        if size > STEP_BYTES:
            return None
    return b"".join(_outline_of(shape))


def _check_empty(body: Body, span: tuple[int, int], name: str, shape: Sequence[int]) -> None:
    text = body.read(*span) if span[1] - span[0] <= STEP_BYTES else b""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"elements of input {name!r:.80}", "0, by its shape") from error
    expected: Any = []
    for length in reversed(shape[: shape.index(0)]):
        expected = [expected] * min(length, STEP_BYTES)
    if items not in ([], expected):
        raise invalid(f"elements of input {name!r:.80}", "0, by its shape")


def _parse(text: bytes | bytearray, name: str) -> list[Any]:
    try:
        items: list[Any] = orjson.loads(text)
    except ValueError:
        items = _parse_leniently(text, name)
    return items


def _parse_leniently(text: bytes | bytearray, name: str) -> list[Any]:
    """As Python's parser, which takes NaN, Infinity and lone surrogates too."""
    try:
        items: list[Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"input {name!r:.80}: {error}"[:200], "a list in JSON") from error
    return items


def pack_items(items: Sequence[Any], name: str, datatype: str, text: bytes | bytearray | None = None) -> bytes:
    """The little-endian bytes of parsed elements. `text`: what they were parsed from, where that is flat JSON. Raises
    ShoalError(INVALID_ARGUMENT)."""
    if datatype == "BYTES":
        _check_types(items, name, datatype)
        return _pack_texts(items, name)
    # `struct` refuses what is no number, except that it takes a boolean for one: true has a u, false an s.
    if datatype == "BOOL" or text is None or b"u" in text or b"s" in text:
        _check_types(items, name, datatype)
    try:
        return struct.Struct(f"<{len(items)}{FORMATS[datatype]}").pack(*items)
    except (struct.error, OverflowError) as error:
        _check_types(items, name, datatype)
        raise invalid(f"input {name!r:.80}: {error}"[:300], f"what {datatype} holds") from error


def _pack_texts(items: Sequence[str], name: str) -> bytes:
    try:
        texts = [item.encode() for item in items]
    except UnicodeEncodeError as error:
        raise invalid(f"input {name!r:.80}: {error}"[:300], "what BYTES holds") from error
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def _check_types(items: Sequence[Any], name: str, datatype: str) -> None:
    wrong = set(map(type, items)) - ITEM_TYPES[datatype]
    if wrong:
        kinds = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise invalid(f"{kinds} in input {name!r:.80}", f"what {datatype} holds")


def _shape_mismatch(name: str, shape: Sequence[int], count: int, nested: bool) -> ShoalError:
    if nested:
        return invalid(f"lists of input {name!r:.80} that are not its shape", f"{list(shape)}, or one flat list")
    return invalid(f"elements of input {name!r:.80} that are not one flat list of {count}", f"{count}, by its shape")


def write_json(name: str, datatype: str, raw: memoryview, into: io.BytesIO, most: int) -> Generator[None, None, None]:
    """Append a tensor's elements as JSON, separated by commas, without brackets. `into` may hold `most` bytes.

    Raises ShoalError(INVALID_ARGUMENT) for values that JSON cannot carry, ShoalError(TOO_LARGE).
    """
    form = FORMATS.get(datatype)
    if form is None and datatype != "BYTES":
        raise invalid(f"output {name!r:.80}: {datatype} in JSON", "binary_data: true for this output")
    between = b""
    for items in _texts_of(name, raw) if form is None else _items_of(form, raw):
        into.write(between + _to_text(items)[1:-1])
        between = b","
        if into.tell() > most:
            raise refuse(
                Code.TOO_LARGE,
                f"an answer of over {most} bytes as JSON",
                f"at most {most} bytes",
                "ask for binary outputs: binary_data_output, or binary_data of an output",
            )
        yield


def _to_text(items: list[Any]) -> bytes:
    text = orjson.dumps(items)
    if b"null" in text and not isinstance(items[0], str):  # NaN and infinities, which standard JSON does not have
        return json.dumps(items, separators=(",", ":")).encode()
    return text


def _items_of(form: str, raw: memoryview) -> Iterator[list[Any]]:
    size = struct.calcsize(f"<{form}")
    for start in range(0, len(raw) // size * size, size * _ITEMS_A_STEP):
        count = min(_ITEMS_A_STEP, (len(raw) - start) // size)
        yield list(struct.unpack_from(f"<{count}{form}", raw, start))


def _texts_of(name: str, raw: memoryview) -> Iterator[list[str]]:
    found: list[str] = []
    offset = size = 0
    while offset < len(raw):
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size
        try:
            found.append(bytes(raw[offset : offset + length]).decode())
        except UnicodeDecodeError as error:
            asked = "binary_data: true for this output"
            raise invalid(f"output {name!r:.80}: strings that are not UTF-8", asked) from error
        offset += length
        size += length
        if len(found) == _STRINGS_A_STEP or size > STEP_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found
