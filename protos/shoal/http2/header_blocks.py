"""Header blocks (HPACK, RFC 7541) by the library `hpack`, and the rules for fields of requests and responses.

A client repeats the block of its calls byte for byte once its fields are in the dynamic table. So a connection keeps
what its latest blocks decode to, until a block changes the table.
"""

from collections.abc import Iterable
from typing import Final

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

MAX_BLOCK_BYTES: Final = 32 * 2**10
"""Largest header block, as sent."""
MAX_LIST_BYTES: Final = 64 * 2**10
"""Largest list of fields once decoded, each with 32 bytes of overhead, as HPACK counts."""
_FIELD_OVERHEAD: Final = 32
_KEPT_BLOCKS: Final = 16
_KEPT_BYTES: Final = 1024
"""Blocks that are larger are not kept."""
_SIZE_UPDATE: Final = 0b0010_0000
_SIZE_UPDATE_MASK: Final = 0b1110_0000

_REQUEST_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_FORBIDDEN_IN_NAME: Final = frozenset(range(0x21)) | frozenset(range(0x41, 0x5B)) | frozenset(range(0x7F, 0x100))
_STATIC_FIELDS: Final = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, 1) if field[1]}
"""Indices of the static table's whole fields (RFC 7541, appendix A)."""
_STATIC_NAMES: Final = {name: index for index, (name, _) in reversed(tuple(enumerate(HeaderTable.STATIC_TABLE, 1)))}
_FORBIDDEN_IN_VALUE: Final = frozenset(b"\x00\r\n")


class HeadersTooLarge(Exception):
    """The fields exceed MAX_LIST_BYTES. The table is unusable afterwards."""


class HeadersUnreadable(Exception):
    """The block is not HPACK. The table is unusable afterwards."""


class HeaderList:
    """Fields of one block, in order. Equal blocks of a connection share one object."""

    __slots__ = ("fields", "parsed")

    def __init__(self, fields: tuple[tuple[bytes, bytes], ...]) -> None:
        self.fields = fields
        self.parsed: object = None
        """What the user of the connection made of the fields, kept for the next equal block."""

    def get(self, name: bytes) -> bytes | None:
        """The field's first value."""
        return next((value for key, value in self.fields if key == name), None)


class HeaderDecoder:
    """Decodes the header blocks of one direction of a connection, each of them, in order."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._kept: dict[bytes, HeaderList] = {}

    def decode(self, block: bytes) -> HeaderList:
        """Raises HeadersTooLarge, HeadersUnreadable."""
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        plain = _decode_literals(block)
        if plain is not None:
            return self._keep(block, HeaderList(plain))
        table = self._decoder.header_table.dynamic_entries
        entries, newest = len(table), table[0] if table else None
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise HeadersTooLarge from error
        except HPACKError as error:
            raise HeadersUnreadable(str(error)[:200]) from error
        found = HeaderList(fields)
        if len(table) != entries or (table[0] if table else None) is not newest:
            self._kept.clear()
        elif not (block and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE):
            self._keep(block, found)
        return found

    def _keep(self, block: bytes, found: HeaderList) -> HeaderList:
        if len(block) <= _KEPT_BYTES:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = found
        return found


def _decode_literals(block: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    """The fields of a block as `encode` makes it, which neither reads nor changes the dynamic table; None for any
    other. Fronts send each other such blocks, each a new one; the library takes 5 us for a field.

    Raises HeadersTooLarge.
    """
    fields: list[tuple[bytes, bytes]] = []
    at, end, size = 0, len(block), 0
    try:
        while at < end:
            first = block[at]
            at += 1
            if first & 0x80:
                name, value = _static_field(first & 0x7F)
            elif first & 0xF0 in (0x00, 0x10):
                index = first & 0x0F
                if index == 0x0F:
                    index += block[at]
                    at += 1
                if index:
                    name = _static_field(index)[0]
                else:
                    name, at = _literal(block, at)
                value, at = _literal(block, at)
            else:
                return None
            fields.append((name, value))
            size += len(name) + len(value) + _FIELD_OVERHEAD
            if size > MAX_LIST_BYTES:
                raise HeadersTooLarge
    except (IndexError, _OtherForm):
        return None
    return tuple(fields)


class _OtherForm(Exception):
    """A form that `encode` does not use."""


def _static_field(index: int) -> tuple[bytes, bytes]:
    if not 1 <= index <= len(HeaderTable.STATIC_TABLE):
        raise _OtherForm
    return HeaderTable.STATIC_TABLE[index - 1]


def _literal(block: bytes, at: int) -> tuple[bytes, int]:
    """A string without Huffman's code, and where it ends."""
    size = block[at]
    at += 1
    if size >= 0x7F:
        if size != 0x7F:
            raise _OtherForm
        shift = 0
        while (byte := block[at]) & 0x80:
            size += (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > 28:
                raise _OtherForm
        size += byte << shift
        at += 1
    if at + size > len(block):
        raise _OtherForm
    return block[at : at + size], at + size


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block that neither reads nor changes the receiver's dynamic table, so that it can be sent again as it is, on
    any connection: indices of the static table, and literals that are never indexed, without Huffman's code.

    The library takes ten times as long, which is a third of what a refused call costs.
    """
    block = bytearray()
    for name, value in fields:
        index = _STATIC_FIELDS.get((name, value))
        if index is not None:
            block.append(0x80 | index)
            continue
        index = _STATIC_NAMES.get(name, 0)
        block += _integer(index, 4, 0x10)
        if not index:
            block += _integer(len(name), 7, 0)
            block += name
        block += _integer(len(value), 7, 0)
        block += value
    return bytes(block)


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
    seen: dict[bytes, bytes] = {}
    for name, value in fields.fields:
        if name.startswith(b":"):
            if name not in _REQUEST_PSEUDO or name in seen:
                return f"pseudo-header {name!a:.40}"
            seen[name] = value
    if error := _order_error(fields) or field_error(fields):
        return error
    if missing := {b":method", b":scheme", b":path"} - seen.keys():
        return f"no {min(missing).decode()}"
    return None if seen[b":path"] else "an empty :path"


def response_error(fields: HeaderList) -> str | None:
    """Why the fields are no head of a response; None: they are."""
    pseudo = [name for name, _ in fields.fields if name.startswith(b":")]
    if pseudo != [b":status"]:
        return "not exactly one :status"
    return _order_error(fields) or field_error(fields)


def trailer_error(fields: HeaderList) -> str | None:
    """Why the fields are no trailers; None: they are."""
    if any(name.startswith(b":") for name, _ in fields.fields):
        return "a pseudo-header in trailers"
    return field_error(fields)


def _order_error(fields: HeaderList) -> str | None:
    is_past = False
    for name, _ in fields.fields:
        if not name.startswith(b":"):
            is_past = True
        elif is_past:
            return "a pseudo-header after a field"
    return None


def field_error(fields: HeaderList) -> str | None:
    """Why a field that is no pseudo-header is malformed (RFC 9113, sections 8.2.1 and 8.2.2); None: none is."""
    for name, value in fields.fields:
        if not name.startswith(b":") and (not name or not _FORBIDDEN_IN_NAME.isdisjoint(name) or b":" in name):
            return f"field name {name!a:.40}"
        if not _FORBIDDEN_IN_VALUE.isdisjoint(value) or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
            return f"the value of {name!a:.40}"
        if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            return f"field {name!a:.40}, which is for HTTP/1.1"
    return None
