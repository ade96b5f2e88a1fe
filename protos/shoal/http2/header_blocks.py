"""Header blocks (HPACK, RFC 7541) by the library `hpack`, and the rules for fields of requests and responses.

A client repeats the block of its calls byte for byte once its fields are in the dynamic table. So a connection keeps
what its latest blocks decode to, until a block changes the table. One that states deadlines, or ids, repeats most
fields: those with which the latest block began are not read again, and what was found well-formed is kept too.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from hpack import Decoder, HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

MAX_BLOCK_BYTES: Final = 32 * 2**10
"""Largest header block, as sent."""
MAX_LIST_BYTES: Final = 64 * 2**10
"""Largest list of fields once decoded, each with 32 bytes of overhead, as HPACK counts."""
_FIELD_OVERHEAD: Final = 32
_KEPT_BLOCKS: Final = 16
_KEPT_BYTES: Final = 1024
"""Blocks that are larger are not kept."""
_KEPT_FIELDS: Final = 64
_KEPT_FIELD_BYTES: Final = 512
"""The same, of single fields."""
_LAST_FIELDS: Final = 64
"""Of a block with more, none is kept to be read by: of 1,000 fields of a byte each it would take 73 KB a connection.
A choice."""
_INDEXED: Final = 0b1000_0000
_ADDED: Final = 0b0100_0000
_SIZE_UPDATE: Final = 0b0010_0000
_SIZE_UPDATE_MASK: Final = 0b1110_0000
"""How a field begins: an entry of the table; a field to add to it; a change of its size. Else a field alone."""
_NEVER_INDEXED: Final = 0b0001_0000
"""How a field begins that is never to be added."""
_ONE_BYTE_SIZE: Final = 0x7F
"""Texts below it have their size in one byte."""
_ADDED_INDEX: Final = 0b0011_1111
_OTHER_INDEX: Final = 0b0000_1111
"""Bits of the index of a name."""
_HUFFMAN: Final = 0b1000_0000
"""First bit of a string in Huffman's code."""

_REQUEST_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_FORBIDDEN_IN_NAME: Final = bytes((*range(0x21), *range(0x41, 0x5B), *range(0x7F, 0x100)))
_STATIC: Final[Sequence[tuple[bytes, bytes]]] = ((b"", b""), *HeaderTable.STATIC_TABLE)
_STATIC_ENTRIES: Final = len(HeaderTable.STATIC_TABLE)
"""The static table, which begins at 1, and how many entries it has. Were it known as a tuple of 62, compiled code would
make one anew for each look into it."""
_STATIC_FIELDS: Final = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, 1) if field[1]}
"""Indices of the static table's whole fields (RFC 7541, appendix A)."""
_STATIC_NAMES: Final = {name: index for index, (name, _) in reversed(tuple(enumerate(HeaderTable.STATIC_TABLE, 1)))}


class HeadersTooLarge(Exception):
    """The fields exceed MAX_LIST_BYTES. The table is unusable afterwards."""


class HeadersUnreadable(Exception):
    """The block is not HPACK. The table is unusable afterwards."""


class HeaderList:
    """Fields of one block, in order. Equal blocks of a connection share one object."""

    __slots__ = ("_declared_bytes", "_response_error", "fields", "is_request", "like", "parsed", "same", "sound")

    def __init__(self, fields: tuple[tuple[bytes, bytes], ...], sound: "SoundFields | None" = None) -> None:
        self.fields = fields
        self._declared_bytes: int | None = None
        """As `declared_bytes`, once that was asked for; so is the next one."""
        self._response_error: tuple[bool, str | None] | None = None
        self.parsed: object = None
        """What the user of the connection made of the fields, kept for the next equal block."""
        self.is_request = False
        """Whether they were found to be the head of a request."""
        self.like: HeaderList | None = None
        """The fields of the block before, as long as no other follows; None without one."""
        self.same = 0
        """How many fields both begin with."""
        self.sound = SoundFields() if sound is None else sound

    def get(self, name: bytes) -> bytes | None:
        """The field's first value."""
        return next((value for key, value in self.fields if key == name), None)

    def declared_bytes(self) -> int | None:
        """The field content-length; -1 without it, None where it is no length."""
        found = self._declared_bytes
        if found is None:
            declared = self.get(b"content-length")
            if declared is not None and (not declared.isdigit() or len(declared) > 18):
                return None
            found = self._declared_bytes = -1 if declared is None else int(declared)
        return found

    def response_error(self) -> tuple[bool, str | None]:
        """Whether the fields are a response's head and no trailers, and why they are malformed; None: they are not."""
        found = self._response_error
        if found is None:
            is_head = self.get(b":status") is not None
            found = self._response_error = is_head, (response_error(self) if is_head else trailer_error(self))
        return found


class SoundFields:
    """Fields of one connection that were found well-formed: most come in each block."""

    def __init__(self) -> None:
        self._known: set[tuple[bytes, bytes]] = set()

    def error(self, field: tuple[bytes, bytes]) -> str | None:
        """As `field_error`."""
        if field in self._known:
            return None
        found = field_error(*field)
        if found is None and len(field[0]) + len(field[1]) <= _KEPT_FIELD_BYTES:
            if len(self._known) >= _KEPT_FIELDS:
                self._known.clear()
            self._known.add(field)
        return found


class _LastBlock:
    """A block that did not change the table, and how it was read."""

    __slots__ = ("_block", "_ends", "_sizes", "found")

    def __init__(self, block: bytes, found: HeaderList, ends: list[int], sizes: list[int]) -> None:
        """ends, sizes: of each field, where it ends in the block, and the size of the list with it."""
        self._block = block
        self.found = found
        self._ends = ends
        self._sizes = sizes

    def copy_start(self, block: bytes, fields: list[tuple[bytes, bytes]], ends: list[int], sizes: list[int]) -> None:
        """Add to the lists the fields with which the other block begins as well, byte for byte."""
        known, kept, least, most = self._block, self._ends, 0, len(self._ends)
        while least < most:  # how many they are
            count = (least + most + 1) // 2
            if block.startswith(known[: kept[count - 1]]):
                least = count
            else:
                most = count - 1
        fields += self.found.fields[:least]
        ends += kept[:least]
        sizes += self._sizes[:least]


class HeaderDecoder:
    """Decodes the header blocks of one direction of a connection, each of them, in order.

    The table is the library's, and so are Huffman's code and changes of the table's size. What is read around them is
    read here: the library takes 2 to 5 us for a field, and clients with deadlines or behind a proxy send a new block
    with each request.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._table = self._decoder.header_table
        self._kept: dict[bytes, HeaderList] = {}
        self._last: _LastBlock | None = None
        """The latest of at most _LAST_FIELDS that was read, unless the table changed since."""
        self._sound = SoundFields()

    def decode(self, block: bytes) -> HeaderList:
        """Raises HeadersTooLarge, HeadersUnreadable."""
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        try:
            if block and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
                self._forget()
                fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
                return HeaderList(fields, self._sound)
            found, is_table_new = self._read(block)
        except OversizedHeaderListError as error:
            raise HeadersTooLarge from error
        except HPACKError as error:
            raise HeadersUnreadable(str(error)[:200]) from error
        except IndexError:
            raise HeadersUnreadable("a block that ends within a field, or an entry that there is not") from None
        if is_table_new:
            self._forget()
        else:
            self._keep(block, found)
        return found

    def _forget(self) -> None:
        """The table changes: equal bytes may stand for another field from now on."""
        self._kept.clear()
        self._last = None

    def _keep(self, block: bytes, found: HeaderList) -> None:
        if len(block) <= _KEPT_BYTES:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = found

    def _read(self, block: bytes) -> tuple[HeaderList, bool]:
        """The fields, and whether they changed the table. Raises HeadersTooLarge, HPACKError, IndexError."""
        table, dynamic = self._table, self._table.dynamic_entries
        fields: list[tuple[bytes, bytes]] = []
        ends: list[int] = []
        sizes: list[int] = []
        is_table_new = False
        like: HeaderList | None = None
        if self._last is not None:
            self._last.copy_start(block, fields, ends, sizes)
            like = self._last.found
            like.like = None  # or each would hold all before it
        same = len(fields)
        at, size = (ends[-1], sizes[-1]) if ends else (0, 0)
        end = len(block)
        while at < end:
            first = block[at]
            at += 1
            if first & _INDEXED:
                index = first & 0x7F
                if index == 0x7F:
                    index, at = _integer_at(block, at, index)
                if index == 0:
                    raise HPACKDecodingError("entry 0")
                field = _STATIC[index] if index <= _STATIC_ENTRIES else dynamic[index - _STATIC_ENTRIES - 1]
            elif first & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
                raise HPACKDecodingError("a change of the table's size within a block")
            else:
                mask = _ADDED_INDEX if first & _ADDED else _OTHER_INDEX
                index = first & mask
                if index == mask:
                    index, at = _integer_at(block, at, index)
                if index == 0:
                    name, at = _text_at(block, at)
                else:
                    name, _ = _STATIC[index] if index <= _STATIC_ENTRIES else dynamic[index - _STATIC_ENTRIES - 1]
                value, at = _text_at(block, at)
                field = name, value
                if first & _ADDED:
                    table.add(name, value)
                    is_table_new = True
            fields.append(field)
            size += len(field[0]) + len(field[1]) + _FIELD_OVERHEAD
            if size > MAX_LIST_BYTES:
                raise HeadersTooLarge
            ends.append(at)
            sizes.append(size)
        found = HeaderList(tuple(fields), self._sound)
        found.like, found.same = like, same
        if end <= _KEPT_BYTES and len(fields) <= _LAST_FIELDS:
            self._last = _LastBlock(block, found, ends, sizes)
        return found, is_table_new


def _integer_at(block: bytes, at: int, value: int) -> tuple[int, int]:
    """An integer whose prefix has all bits set (`value`), and where it ends. Raises HPACKDecodingError, IndexError."""
    for shift in range(0, 35, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, at
    raise HPACKDecodingError("an integer of more than five bytes")


def _text_at(block: bytes, at: int) -> tuple[bytes, int]:
    """A string, and where it ends. Raises HPACKDecodingError, IndexError."""
    first = block[at]
    size, at = first & 0x7F, at + 1
    if size == 0x7F:
        size, at = _integer_at(block, at, size)
    after = at + size
    if after > len(block):
        raise IndexError
    text = block[at:after]
    return (decode_huffman(text) if first & _HUFFMAN else text), after


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block that neither reads nor changes the receiver's dynamic table, so that it can be sent again as it is, on
    any connection: indices of the static table, and literals that are never indexed, without Huffman's code.

    The library takes ten times as long, which is a third of what a refused call costs.
    """
    block = bytearray()
    for name, value in fields:
        known = _STATIC_NAMES.get(name)
        if known is None:
            block.append(_NEVER_INDEXED)
            _add_text(block, name)
        elif (index := _STATIC_FIELDS.get((name, value))) is not None:
            block.append(_INDEXED | index)
            continue
        else:
            block += _integer(known, 4, _NEVER_INDEXED)
        _add_text(block, value)
    return bytes(block)


def _add_text(block: bytearray, text: bytes) -> None:
    size = len(text)
    if size < _ONE_BYTE_SIZE:
        block.append(size)
    else:
        block += _integer(size, 7, 0)
    block += text


def _integer(value: int, prefix_bits: int, first: int) -> bytes:
    """As RFC 7541, section 5.1. first: the bits before the prefix."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((first | value,))
    found = bytearray((first | most,))
    value -= most
    while value > 0x7F:
        found.append(0x80 | (value & 0x7F))
        value >>= 7
    found.append(value)
    return bytes(found)


def request_error(fields: HeaderList) -> str | None:
    """Why the fields are no head of a request (RFC 9113, section 8.3.1); None: they are."""
    error = _later_error(fields) if _begins_as_request(fields) else _request_error(fields)
    fields.is_request = error is None
    return error


def _begins_as_request(fields: HeaderList) -> bool:
    """Whether they begin with those of another request's head, with all its pseudo-headers: a field comes after
    these."""
    like, same = fields.like, fields.same
    return like is not None and like.is_request and same > 0 and not fields.fields[same - 1][0].startswith(b":")


def _later_error(fields: HeaderList) -> str | None:
    """As `request_error`, of what comes after the start of another request's head."""
    for field in fields.fields[fields.same :]:
        if field[0].startswith(b":"):
            return "a pseudo-header after a field"
        if (error := fields.sound.error(field)) is not None:
            return error
    return None


def _request_error(fields: HeaderList) -> str | None:
    seen: dict[bytes, bytes] = {}
    is_past, sound = False, fields.sound
    for field in fields.fields:
        name = field[0]
        if not name.startswith(b":"):
            is_past = True
        elif is_past:
            return "a pseudo-header after a field"
        elif name not in _REQUEST_PSEUDO or name in seen:
            return f"pseudo-header {name!a:.40}"
        else:
            seen[name] = field[1]
        if (error := sound.error(field)) is not None:
            return error
    if missing := {b":method", b":scheme", b":path"} - seen.keys():
        return f"no {min(missing).decode()}"
    return None if seen[b":path"] else "an empty :path"


def response_error(fields: HeaderList) -> str | None:
    """Why the fields are no head of a response; None: they are."""
    pseudo = [name for name, _ in fields.fields if name.startswith(b":")]
    if pseudo != [b":status"]:
        return "not exactly one :status"
    if fields.fields[0][0] != b":status":
        return "a pseudo-header after a field"
    return _any_error(fields)


def trailer_error(fields: HeaderList) -> str | None:
    """Why the fields are no trailers; None: they are."""
    if any(name.startswith(b":") for name, _ in fields.fields):
        return "a pseudo-header in trailers"
    return _any_error(fields)


def _any_error(fields: HeaderList) -> str | None:
    return next((error for each in fields.fields if (error := fields.sound.error(each)) is not None), None)


def field_error(name: bytes, value: bytes) -> str | None:
    """Why a field is malformed (RFC 9113, sections 8.2.1 and 8.2.2); None: it is not. Whether a pseudo-header is one
    that there is is asked elsewhere."""
    is_plain = len(name.translate(None, _FORBIDDEN_IN_NAME)) == len(name)
    if not name.startswith(b":") and (not name or not is_plain or b":" in name):
        return f"field name {name!a:.40}"
    has_line_end = b"\r" in value or b"\n" in value or b"\0" in value
    if has_line_end or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
        return f"the value of {name!a:.40}"
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        return f"field {name!a:.40}, which is for HTTP/1.1"
    return None
