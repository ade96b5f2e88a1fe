"""Writes protobuf's variable-length integers, for messages that are made by hand."""


def varint(value: int, least: int = 1) -> bytes:
    """The value as protobuf writes it: seven bits a byte, the lowest first. A negative one is an int64, and takes ten
    bytes. least: bytes that it takes at least, for a length that is filled in later; every parser takes the padding.

    Source: https://protobuf.dev/programming-guides/encoding/#varints
    """
    if 0 <= value <= 0x7F and least == 1:
        return bytes((value,))
    value &= 2**64 - 1
    content = bytearray()
    while value > 0x7F or len(content) + 1 < least:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
