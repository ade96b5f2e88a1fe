"""An MQTT 5 client that may break the rules and sees the broker's own reason codes."""

import ssl
import threading
from types import TracebackType
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

ANSWER_S = 5.0
NOT_AUTHORIZED = 0x87


class Closed(Exception):
    """The connection was refused or ended."""


class MqttPeer:
    """One connection. received: (topic, payload) in order of arrival."""

    def __init__(self, port: int, context: ssl.SSLContext | None, identifier: str, *, will: str = "") -> None:
        self.received: list[tuple[str, bytes]] = []
        self.ended = threading.Event()
        self._answer: dict[int, int] = {}
        self._changed = threading.Condition()
        self._connected: int | None = None
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, identifier, protocol=paho.MQTTv5, reconnect_on_failure=False
        )
        if context is not None:
            client.tls_set_context(context)
        if will:
            client.will_set(will, b"gone", qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = lambda _c, _u, mid, codes, _p: self._on_answer(mid, codes[0].value)
        client.on_publish = lambda _c, _u, mid, code, _p: self._on_answer(mid, code.value)
        client.on_message = self._on_message
        try:
            client.connect("127.0.0.1", port, keepalive=30, clean_start=True)
            client.loop_start()
            self._await(lambda: self._connected is not None or self.ended.is_set())
        except (OSError, AssertionError) as cause:
            self.close()
            raise Closed(str(cause)) from cause
        if self._connected != 0:
            self.close()
            raise Closed(f"reason {self._connected}")

    def subscribe(self, topic: str) -> int:
        """The broker's reason code: 0 to 2 grant a QoS."""
        _, mid = self._client.subscribe(topic, qos=1)
        return self._reason(mid)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        """The broker's reason code: 0, or 16 if there is no subscriber."""
        return self._reason(self._client.publish(topic, payload, qos=1, retain=retain).mid)

    def send(self, topic: str, payload: bytes) -> None:
        """As `publish`, without waiting for the broker's answer."""
        self._client.publish(topic, payload, qos=1)

    def flood_once(self, topic: str, payload: bytes, qos: int) -> bool:
        """Write one more message; False once the connection has ended, or accepts nothing for a second."""
        if self.ended.is_set():
            return False
        try:
            sent = self._client.publish(topic, payload, qos=qos)
            sent.wait_for_publish(1.0)
        except (RuntimeError, ValueError):
            return False
        return sent.is_published()

    def pause(self) -> None:
        """Stop reading; the connection stays open."""
        self._client.loop_stop()

    def resume(self) -> None:
        self._client.loop_start()

    def wait_received(self, count: int) -> list[tuple[str, bytes]]:
        """Wait until `count` messages have arrived."""
        self._await(lambda: len(self.received) >= count)
        return list(self.received)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def vanish(self) -> None:
        """Close without a DISCONNECT, so that the broker publishes the will."""
        self._client.loop_stop()
        found = self._client.socket()
        assert found is not None
        found.close()

    def __enter__(self) -> "MqttPeer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _reason(self, mid: int | None) -> int:
        assert mid is not None
        self._await(lambda: mid in self._answer or self.ended.is_set())
        if mid not in self._answer:
            raise Closed("ended instead of an answer")
        return self._answer[mid]

    def _await(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, ANSWER_S), "the broker did not answer"

    def _on_answer(self, mid: int, code: int) -> None:
        with self._changed:
            self._answer[mid] = code
            self._changed.notify_all()

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        with self._changed:
            self._connected = code.value
            self._changed.notify_all()

    def _on_disconnect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    def _on_message(self, client: Any, data: Any, message: Any) -> None:
        with self._changed:
            self.received.append((message.topic, message.payload))
            self._changed.notify_all()
