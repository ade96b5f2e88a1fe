"""The frames of all Unix sockets inside an agent, between supervisor, front and workers.

A frame has a fixed head (magic, type, sizes, call id), a header of at most 64 KiB, and a payload of bytes. A client
opens a connection with the server's nonce. Calls then run concurrently on it, and each is answered by a reply or a
refusal. Either side may end a call early: the client cancels it, the server closes the connection. The server may also
push messages.

The header of a call, reply or push is JSON. The one kind of which there are thousands a second, `infer`, has a binary
header and an answer without one (docs/decisions/0024-frames-and-runs.md).

`format` is the format without a socket, `connection` a socket's bytes in and out; `client` and `server` are its ends.
"""

from shoal.agent.frames.client import ConnectionLost, FrameClient, PendingCall, Push
from shoal.agent.frames.format import (
    MAX_HEADER,
    MAX_PAYLOAD,
    FrameError,
    FrameMessage,
    Header,
    InferAnswer,
    Payload,
)
from shoal.agent.frames.server import (
    MAX_PENDING_BYTES,
    MAX_PENDING_CALLS,
    FrameServer,
    Handler,
    InferCall,
    OnInfer,
)
from shoal.agent.frames.unix_peers import HELLO_TIMEOUT_S, start_time

__all__ = [
    "HELLO_TIMEOUT_S",
    "MAX_HEADER",
    "MAX_PAYLOAD",
    "MAX_PENDING_BYTES",
    "MAX_PENDING_CALLS",
    "ConnectionLost",
    "FrameClient",
    "FrameError",
    "FrameMessage",
    "FrameServer",
    "Handler",
    "Header",
    "InferAnswer",
    "InferCall",
    "OnInfer",
    "Payload",
    "PendingCall",
    "Push",
    "start_time",
]
