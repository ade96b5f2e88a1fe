"""Converts between messages and nouns, with checks.

Each message of nouns.proto, link.proto and federation.proto mirrors one frozen dataclass of `shoal.types`, by field
names. So one rule converts them all, built once per class from its type hints. A value that cannot be a noun (an
unknown enum value, an infinite number, an overlong string or list) is MESSAGE_INVALID. The cores judge values that are
merely implausible. Fields and codes of a newer version are ignored.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from shoal.types import link
from shoal.types.assignment import DesiredSet, Observed, Status, Version
from shoal.types.chain import EVIDENCE_CHARS_TAKEN
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import FromAgent, ToAgent
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.workload import WorkloadKey
from shoal.v1 import federation_pb2, link_pb2, nouns_pb2
from shoal.wire.field_limits import CountLimits, check_counts
from shoal.wire.request_limits import RECEIPT, SESSION_ITEMS

Noun = TypeVar("Noun")
View = TypeVar("View", bound=Message)
Items = TypeVar("Items", bound=Sized)

MAX_TEXT: Final = 4096
MAX_ITEMS: Final = 100_000
MAX_ITEMS_BY_FIELD: Final[Mapping[str, int]] = {
    **{name.removeprefix("shoal.v1."): most for name, most in SESSION_ITEMS.items()},
    "Device.links": 128,
    "FederationRoots.pems": 16,
}
"""Limits of items in an agent's messages, and of a federation's CAs, checked before any item is read."""

MAX_TEXT_BY_FIELD: Final[Mapping[str, int]] = {"LedgerEntry.evidence": EVIDENCE_CHARS_TAKEN}

_REQUIRED: Final = object()


class _Codec(NamedTuple):
    """Converts one field."""

    # Writes a value into a message's field.
    put: Callable[[Any, str, Any], None]
    # Makes a value from the message's field.
    get: Callable[[Any], Any]
    # Value of a field that is not on the wire.
    absent: Any


class _Mirror(NamedTuple):
    """Converts one class of nouns."""

    # By field name.
    codecs: dict[str, _Codec]
    # Values of fields that may be missing on the wire.
    absent: dict[str, Any]
    # Fields that must be on the wire.
    required: tuple[str, ...]


_MESSAGES: Final[dict[Any, Any]] = {}
_MIRRORS: Final[dict[Any, _Mirror]] = {}
"""By class of noun."""
_SHARED: Final[dict[tuple[type[Any], type[Message]], Mapping[str, _Codec]]] = {}
"""Codecs of the fields that a value shares with a view, by both classes."""


def to_wire(noun: Any) -> Any:
    """The message that mirrors this noun."""
    message = message_class(type(noun))()
    _fill(message, noun)
    return message


def fill_view(view: View, value: Any) -> View:
    """`view` with every field that the dataclass `value` has by the same name; its other fields stay as they are."""
    kinds = type(value), type(view)
    if kinds not in _SHARED:
        _SHARED[kinds] = _codecs(type(value), view.DESCRIPTOR.fields_by_name)
    for name, codec in _SHARED[kinds].items():
        codec.put(view, name, getattr(value, name))
    return view


def from_wire(kind: type[Noun], message: Message) -> Noun:
    """The noun of class `kind`. Raises ShoalError(MESSAGE_INVALID)."""
    noun: Noun = _read(kind, message)
    return noun


def encode(noun: Any) -> bytes:
    """Canonical bytes: the same noun gives the same bytes (maps are sorted)."""
    return to_wire(noun).SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def decode(kind: type[Noun], data: bytes, limits: CountLimits | None = None) -> Noun:
    """The noun of class `kind` in `data`. limits: for data of another party; None for trusted data.

    Raises ShoalError(MESSAGE_INVALID | FIELD_TOO_MANY).
    """
    message = message_class(kind)()
    if limits is not None and (refusal := check_counts(message.DESCRIPTOR, data, limits)) is not None:
        raise ShoalError(refusal)
    try:
        message.ParseFromString(data)
    except DecodeError as cause:
        raise _invalid(kind.__name__, "bytes that are no such message") from cause
    return from_wire(kind, message)


def make_signed_receipt(receipt: Receipt, signature: bytes) -> SignedReceipt:
    return SignedReceipt(receipt, encode(receipt), signature)


_UP: Final = {
    "hello": link.Hello,
    "status": Status,
    "receipts": link.Receipts,
    "events": link.NodeEvents,
    "logs": link.LogLines,
    "spans": link.SpansFound,
}
_DOWN: Final = {
    "welcome": link.Welcome,
    "desired": DesiredSet,
    "probe": link.ProbeNow,
    "refused": link.Refused,
    "lease": link.Lease,
    "logs": link.LogsAsked,
    "spans": link.SpansAsked,
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


class SessionReader:
    """Reads the messages of one node's session.

    A full status repeats most of the full one before. What has the same bytes there, the desired set's version or the
    report of a replica, is the noun that was read and checked then. It holds what one status told.
    """

    def __init__(self) -> None:
        self._replicas: dict[bytes, Observed] = {}
        self._version: tuple[bytes, Version] | None = None

    def read(self, message: link_pb2.FromAgent) -> FromAgent:
        """As `from_agent_from_wire`, whose errors it raises."""
        if message.WhichOneof("message") != "status":
            return from_agent_from_wire(message)
        status, mirror = message.status, _mirror(Status)
        is_full, values = status.full, mirror.absent.copy()
        for field, value in status.ListFields():
            name = field.name
            if name == "version":
                values[name] = self._read_version(value)
            elif name == "observed" and is_full:
                values[name] = self._read_replicas(value)
            else:
                values[name] = mirror.codecs[name].get(value)
        noun: Status = _make(Status, mirror, values)
        return noun

    def _read_version(self, message: nouns_pb2.Version) -> Version:
        data = message.SerializeToString()
        if self._version is None or self._version[0] != data:
            self._version = data, from_wire(Version, message)
        return self._version[1]

    def _read_replicas(self, messages: Sequence[nouns_pb2.Observed]) -> tuple[Observed, ...]:
        _check_count(messages, "Status.observed")
        known, self._replicas = self._replicas, {}
        found: list[Observed] = []
        for message in messages:
            data = message.SerializeToString()
            noun = self._replicas[data] = known.get(data) or from_wire(Observed, message)
            found.append(noun)
        return tuple(found)


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
        modules = (nouns_pb2, link_pb2, federation_pb2)
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
    for name, codec in _mirror(type(noun)).codecs.items():
        codec.put(message, name, getattr(noun, name))


def _read(kind: Any, message: Any) -> Any:
    if kind is SignedReceipt:
        receipt = decode(Receipt, message.content, RECEIPT)
        return SignedReceipt(receipt, message.content, message.signature)
    mirror = _mirror(kind)
    values = mirror.absent.copy()
    for field, value in message.ListFields():  # a third of a heartbeat's fields: absent ones cost nothing
        name = field.name
        values[name] = mirror.codecs[name].get(value)
    return _make(kind, mirror, values)


def _make(kind: Any, mirror: _Mirror, values: dict[str, Any]) -> Any:
    for name in mirror.required:
        if name not in values:
            raise _invalid(f"{kind.__name__}.{name}", "missing")
    return kind(**values)


def _mirror(kind: Any) -> _Mirror:
    if kind not in _MIRRORS:
        codecs = _codecs(kind)
        absent = {name: codec.absent for name, codec in codecs.items() if codec.absent is not _REQUIRED}
        _MIRRORS[kind] = _Mirror(codecs, absent, tuple(name for name in codecs if name not in absent))
    return _MIRRORS[kind]


def _codecs(kind: Any, shared: Container[str] | None = None) -> dict[str, _Codec]:
    """The codecs of the fields of `kind`, in their order. `shared`: the names of those to convert; None: all."""
    hints = get_type_hints(kind)
    names = kind._fields if kind is WorkloadKey else tuple(field.name for field in fields(kind))
    return {name: _codec(hints[name], f"{kind.__name__}.{name}") for name in names if shared is None or name in shared}


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
            lambda value: _read(hint, value),
            _REQUIRED,
        )
    check = _scalar(hint, where)
    absent = _REQUIRED if issubclass(hint, StrEnum) else hint()
    return _Codec(lambda message, name, value: setattr(message, name, value), check, absent)


def _is_message(hint: Any) -> bool:
    return is_dataclass(hint) or hint is WorkloadKey


def _fill_present(message: Any, value: Any) -> None:
    message.SetInParent()
    _fill(message, value)


def _optional(inner: Any, where: str) -> _Codec:
    inner = getattr(inner, "__supertype__", inner)
    if _is_message(inner):
        return _Codec(
            lambda message, name, value: _fill_present(getattr(message, name), value) if value is not None else None,
            lambda value: _read(inner, value),
            None,
        )
    check = _scalar(inner, where)
    if issubclass(inner, str):
        return _Codec(
            lambda message, name, value: setattr(message, name, value or ""),
            lambda value: check(value) if value else None,
            None,
        )
    return _Codec(
        lambda message, name, value: setattr(message, name, value) if value is not None else None,
        check,
        None,
    )


def _repeated(inner: Any, where: str) -> _Codec:
    inner = getattr(inner, "__supertype__", inner)
    if _is_message(inner):

        def put(message: Any, name: str, value: Any) -> None:
            target = getattr(message, name)
            for item in value:
                _fill_present(target.add(), item)

        return _Codec(put, lambda value: tuple([_read(inner, item) for item in _check_count(value, where)]), ())
    check = _scalar(inner, where)

    def read_items(value: Any) -> tuple[Any, ...]:
        if check is _passthrough:  # latency counts, hundreds in each heartbeat
            return tuple(_check_count(value, where))
        return tuple([check(item) for item in _check_count(value, where)])

    return _Codec(lambda message, name, value: getattr(message, name).extend(value), read_items, ())


def _check_count(items: Items, where: str) -> Items:
    """The items. Raises ShoalError(MESSAGE_INVALID) where the field has too many."""
    most = MAX_ITEMS_BY_FIELD.get(where, MAX_ITEMS)
    if len(items) > most:
        raise _invalid(where, f"{len(items)} items, at most {most}")
    return items


def _mapping(inner: Any, where: str) -> _Codec:
    text = _scalar(str, where)
    if get_origin(inner) is tuple:

        def put(message: Any, name: str, value: Any) -> None:
            for key, dims in value.items():
                getattr(message, name)[key].dims.extend(dims)

        return _Codec(put, lambda value: {text(key): tuple(each.dims) for key, each in value.items()}, {})
    check = _scalar(getattr(inner, "__supertype__", inner), where)
    return _Codec(
        lambda message, name, value: getattr(message, name).update(value),
        lambda value: {text(key): check(each) for key, each in value.items()},
        {},
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
            # NaN means unknown, which some fields allow; an infinity is never valid.
            if math.isinf(value):
                raise _invalid(where, "an infinite number")
            return value

        return number
    if kind is str:
        most = MAX_TEXT_BY_FIELD.get(where, MAX_TEXT)

        def text(value: str) -> str:
            if len(value) > most or "\0" in value:
                raise _invalid(where, f"a text of {len(value)} characters, or one with NUL")
            return value

        return text
    return _passthrough


def _passthrough(value: Any) -> Any:
    return value
