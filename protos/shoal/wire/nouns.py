"""Message <-> noun, checked.

Each message of nouns.proto and link.proto mirrors one frozen dataclass of `shoal.types`, field by field and by name; so
one rule converts them all, built once per class from its type hints. What cannot be a noun (an unknown enum value, an
infinite number, an overlong string or list) is MESSAGE_INVALID; what is merely implausible is for the cores to judge.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from shoal.types import link
from shoal.types.assignment import DesiredSet, Status
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import FromAgent, ToAgent
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.workload import WorkloadKey
from shoal.v1 import link_pb2, nouns_pb2

Noun = TypeVar("Noun")

MAX_TEXT: Final = 4096
MAX_ITEMS: Final = 100_000


class _Codec(NamedTuple):
    """put writes a value into a message's field; get reads it back."""

    put: Callable[[Any, str, Any], None]
    get: Callable[[Any, str], Any]


_MESSAGES: Final[dict[Any, Any]] = {}
_CODECS: Final[dict[Any, dict[str, _Codec]]] = {}
"""Built once per class."""


def to_wire(noun: Any) -> Any:
    """The message that mirrors this noun."""
    message = message_class(type(noun))()
    _fill(message, noun)
    return message


def from_wire(kind: type[Noun], message: Message) -> Noun:
    """The noun of class `kind`. Raises ShoalError(MESSAGE_INVALID)."""
    noun: Noun = _read(kind, message)
    return noun


def encode(noun: Any) -> bytes:
    """Canonical bytes: the same noun gives the same bytes (maps are sorted)."""
    return to_wire(noun).SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def decode(kind: type[Noun], data: bytes) -> Noun:
    """Raises ShoalError(MESSAGE_INVALID)."""
    message = message_class(kind)()
    try:
        message.ParseFromString(data)
    except DecodeError as cause:
        raise _invalid(kind.__name__, "bytes that are no such message") from cause
    return from_wire(kind, message)


def signed(receipt: Receipt, signature: bytes) -> SignedReceipt:
    return SignedReceipt(receipt, encode(receipt), signature)


_UP: Final = {"hello": link.Hello, "status": Status, "receipts": link.Receipts, "events": link.NodeEvents}
_DOWN: Final = {
    "welcome": link.Welcome,
    "desired": DesiredSet,
    "probe": link.ProbeNow,
    "refused": link.Refused,
}


def from_agent_to_wire(message: FromAgent) -> link_pb2.FromAgent:
    name = next(name for name, kind in _UP.items() if isinstance(message, kind))
    return link_pb2.FromAgent(**{name: to_wire(message)})


def from_agent_from_wire(message: link_pb2.FromAgent) -> FromAgent:
    """Raises ShoalError(MESSAGE_INVALID)."""
    name = message.WhichOneof("message")
    if name is None:
        raise _invalid("FromAgent", "nothing in it")
    received: FromAgent = _read(_UP[name], getattr(message, name))
    return received


def to_agent_to_wire(message: ToAgent) -> link_pb2.ToAgent:
    name = next(name for name, kind in _DOWN.items() if isinstance(message, kind))
    return link_pb2.ToAgent(**{name: to_wire(message)})


def to_agent_from_wire(message: link_pb2.ToAgent) -> ToAgent:
    """Raises ShoalError(MESSAGE_INVALID)."""
    name = message.WhichOneof("message")
    if name is None:
        raise _invalid("ToAgent", "nothing in it")
    received: ToAgent = _read(_DOWN[name], getattr(message, name))
    return received


def message_class(kind: Any) -> Any:
    """The message class of the same name."""
    if kind not in _MESSAGES:
        modules = (nouns_pb2, link_pb2)
        _MESSAGES[kind] = next(found for each in modules if (found := getattr(each, kind.__name__, None)) is not None)
    return _MESSAGES[kind]


def _invalid(where: str, found: str) -> ShoalError:
    return refuse(
        Code.MESSAGE_INVALID, f"{where}: {found}", "a message as protos/shoal/v1 defines it", "update the sender"
    )


def _fill(message: Any, noun: Any) -> None:
    if isinstance(noun, SignedReceipt):
        message.content, message.signature = noun.content, noun.signature
        return
    for name, codec in _codecs(type(noun)).items():
        codec.put(message, name, getattr(noun, name))


def _read(kind: Any, message: Any) -> Any:
    if kind is SignedReceipt:
        receipt = decode(Receipt, message.content)
        return SignedReceipt(receipt, message.content, message.signature)
    return kind(**{name: codec.get(message, name) for name, codec in _codecs(kind).items()})


def _codecs(kind: Any) -> dict[str, _Codec]:
    if kind not in _CODECS:
        hints = get_type_hints(kind)
        names = kind._fields if kind is WorkloadKey else tuple(field.name for field in fields(kind))
        _CODECS[kind] = {name: _codec(hints[name], f"{kind.__name__}.{name}") for name in names}
    return _CODECS[kind]


def _codec(hint: Any, where: str) -> _Codec:
    hint = getattr(hint, "__supertype__", hint)
    origin = get_origin(hint)
    if origin in (UnionType, Union):
        inner = next(arg for arg in get_args(hint) if arg is not NoneType)
        return _optional(inner, where)
    if origin is tuple:
        return _repeated(get_args(hint)[0], where)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(get_args(hint)[1], where)
    if _is_message(hint):
        return _Codec(
            lambda message, name, value: _fill_present(getattr(message, name), value),
            lambda message, name: _read(hint, _present(message, name, where)),
        )
    check = _scalar(hint, where)
    return _Codec(
        lambda message, name, value: setattr(message, name, value),
        lambda message, name: check(getattr(message, name)),
    )


def _is_message(hint: Any) -> bool:
    return is_dataclass(hint) or hint is WorkloadKey


def _fill_present(message: Any, value: Any) -> None:
    message.SetInParent()
    _fill(message, value)


def _present(message: Any, name: str, where: str) -> Any:
    if not message.HasField(name):
        raise _invalid(where, "missing")
    return getattr(message, name)


def _optional(inner: Any, where: str) -> _Codec:
    inner = getattr(inner, "__supertype__", inner)
    if _is_message(inner):
        return _Codec(
            lambda message, name, value: _fill_present(getattr(message, name), value) if value is not None else None,
            lambda message, name: _read(inner, getattr(message, name)) if message.HasField(name) else None,
        )
    check = _scalar(inner, where)
    if issubclass(inner, str):
        return _Codec(
            lambda message, name, value: setattr(message, name, value or ""),
            lambda message, name: check(getattr(message, name)) if getattr(message, name) else None,
        )
    return _Codec(
        lambda message, name, value: setattr(message, name, value) if value is not None else None,
        lambda message, name: check(getattr(message, name)) if message.HasField(name) else None,
    )


def _repeated(inner: Any, where: str) -> _Codec:
    inner = getattr(inner, "__supertype__", inner)

    def bounded(items: Any) -> Any:
        if len(items) > MAX_ITEMS:
            raise _invalid(where, f"{len(items)} items, at most {MAX_ITEMS}")
        return items

    if _is_message(inner):

        def put(message: Any, name: str, value: Any) -> None:
            target = getattr(message, name)
            for item in value:
                _fill_present(target.add(), item)

        return _Codec(put, lambda message, name: tuple(_read(inner, item) for item in bounded(getattr(message, name))))
    check = _scalar(inner, where)
    return _Codec(
        lambda message, name, value: getattr(message, name).extend(value),
        lambda message, name: tuple(check(item) for item in bounded(getattr(message, name))),
    )


def _mapping(inner: Any, where: str) -> _Codec:
    text = _scalar(str, where)
    if get_origin(inner) is tuple:

        def put(message: Any, name: str, value: Any) -> None:
            for key, dims in value.items():
                getattr(message, name)[key].dims.extend(dims)

        return _Codec(put, lambda message, name: {text(k): tuple(v.dims) for k, v in getattr(message, name).items()})
    check = _scalar(getattr(inner, "__supertype__", inner), where)
    return _Codec(
        lambda message, name, value: getattr(message, name).update(value),
        lambda message, name: {text(key): check(value) for key, value in getattr(message, name).items()},
    )


def _scalar(kind: Any, where: str) -> Callable[[Any], Any]:
    if issubclass(kind, StrEnum):

        def enum(value: str) -> Any:
            try:
                return kind(value)
            except ValueError as cause:
                raise _invalid(where, f"{value!r:.80} is none of its values") from cause

        return enum
    if kind is float:

        def number(value: float) -> float:
            # NaN says unknown, which some fields allow; an infinity is never an answer.
            if math.isinf(value):
                raise _invalid(where, "an infinite number")
            return value

        return number
    if kind is str:

        def text(value: str) -> str:
            if len(value) > MAX_TEXT or "\0" in value:
                raise _invalid(where, f"a text of {len(value)} characters, or one with NUL")
            return value

        return text
    return lambda value: value
