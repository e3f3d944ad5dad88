"""gRPC channels for clients and commands."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

__all__ = ["quiet_channel"]


class _QuietChannel:
    """The part of a channel's interface that generated stubs use."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.unary_unary = partial(_without_traceback, channel.unary_unary)
        self.unary_stream = partial(_without_traceback, channel.unary_stream)


def quiet_channel(channel: grpc.Channel) -> grpc.Channel:
    """Wrap ``channel`` so that replies that cannot be parsed log no traceback.

    Their calls still fail with INTERNAL.
    """
    return cast("grpc.Channel", _QuietChannel(channel))


def _without_traceback(
    make: Callable[..., Any],
    method: str,
    *,
    response_deserializer: Callable[[bytes], Any],
    **more: Any,
) -> Any:
    def parse(reply: bytes) -> Any:
        try:
            return response_deserializer(reply)
        except DecodeError:
            return None  # gRPC treats None as a failure

    return make(method, response_deserializer=parse, **more)
