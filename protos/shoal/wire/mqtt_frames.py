"""Bytes of the frames in `shoal.types.mqtt_frames`, as `protos/shoal/v1/mqtt.proto` defines them.

The signatures around them are in `seal`. All `decode_*` raise ShoalError(MESSAGE_INVALID | TOO_LARGE | FIELD_TOO_MANY).
"""

from shoal.types.link import FromAgent, Hello, ToAgent
from shoal.types.mqtt_frames import NodePresence, Opening, OpeningAnswer, RegionPresence
from shoal.types.units import Seconds
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire import nouns
from shoal.wire.seal import parse


def encode_opening(opening: Opening) -> bytes:
    return mqtt_pb2.Opening(
        hello=nouns.to_wire(opening.hello), key=opening.key, presence=opening.presence, beat=opening.heartbeat
    ).SerializeToString()


def decode_opening(data: bytes) -> Opening:
    message = parse(mqtt_pb2.Opening, data)
    return Opening(nouns.from_wire(Hello, message.hello), message.key, message.presence, message.beat)


def encode_opening_answer(answer: OpeningAnswer) -> bytes:
    return mqtt_pb2.Opened(
        answer=nouns.to_agent_to_wire(answer.answer),
        nonce=answer.nonce,
        key=answer.key,
        models_address=answer.models_address,
        epoch=answer.epoch,
    ).SerializeToString(deterministic=True)


def decode_opening_answer(data: bytes) -> OpeningAnswer:
    message = parse(mqtt_pb2.Opened, data)
    answer = nouns.to_agent_from_wire(message.answer)
    return OpeningAnswer(answer, message.nonce, message.epoch, message.key, message.models_address)


def encode_node_presence(presence: NodePresence) -> bytes:
    return mqtt_pb2.Presence(nonce=presence.nonce, online=presence.online).SerializeToString()


def decode_node_presence(data: bytes) -> NodePresence:
    message = parse(mqtt_pb2.Presence, data)
    return NodePresence(message.nonce, message.online)


def encode_region_presence(presence: RegionPresence) -> bytes:
    return mqtt_pb2.RegionPresence(
        presence=presence.presence, beat=presence.heartbeat, every_s=presence.every_s, online=presence.online
    ).SerializeToString()


def decode_region_presence(data: bytes) -> RegionPresence:
    message = parse(mqtt_pb2.RegionPresence, data)
    return RegionPresence(message.presence, message.beat, Seconds(message.every_s), message.online)


def encode_from_agent(message: FromAgent) -> bytes:
    return nouns.from_agent_to_wire(message).SerializeToString()


def decode_from_agent(data: bytes, reader: nouns.SessionReader) -> FromAgent:
    """reader: of the session."""
    return reader.read(parse(link_pb2.FromAgent, data))


def encode_to_agent(message: ToAgent) -> bytes:
    return nouns.to_agent_to_wire(message).SerializeToString()


def decode_to_agent(data: bytes) -> ToAgent:
    return nouns.to_agent_from_wire(parse(link_pb2.ToAgent, data))
