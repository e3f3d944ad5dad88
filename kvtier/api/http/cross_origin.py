"""Refuses requests from web pages of other origins.

Theory
------
A browser lets any page send requests to any address that its machine can reach, including loopback.
The page cannot read the response, but the request is executed. And if the page's own host name
resolves to this address (DNS rebinding), it can read the response as well. So there are two checks:

* Over loopback, ``Host`` must name this machine. Under DNS rebinding it is the page's name.
* A request from a page of another origin is refused. Browsers report the origin in
  ``Sec-Fetch-Site``, or else in ``Origin``, and a page can set neither. Go's
  ``http.CrossOriginProtection`` does the same for unsafe methods; here GET is checked as well,
  since a page can see whether it succeeds.

Rules
-----
* Every route is checked. Programs other than browsers send neither of the two headers.
* Kubelet and Prometheus connect to the address of the pod or node, where any ``Host`` is accepted.
* A request without ``Host`` is accepted: health checks in HTTP/1.0 send none, browsers always do.
* Following a link is allowed: the page that contains it does not see the answer.
"""

import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.api.http.errors import ApiError

__all__ = ["CrossOriginGuard", "CrossOriginRules"]


@dataclass(frozen=True, slots=True)
class CrossOriginRules:
    """Exceptions to the rules; ``*`` allows any."""

    hosts: Collection[str] = ()
    """Names of this machine besides localhost and its host name."""
    origins: Collection[str] = ()
    """Origins whose pages may send requests and read the answers."""


class CrossOriginGuard:
    """ASGI middleware that refuses requests from pages of other origins, unless allowed."""

    def __init__(self, app: ASGIApp, allowed: CrossOriginRules) -> None:
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, allowed.hosts)}
        self._origins = allowed.origins
        self._app = app
        if allowed.origins:
            # Not among the application's own middleware, which its 500 responses bypass.
            self._app = CORSMiddleware(
                app,
                allow_origins=allowed.origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # clients add their own, such as x-stainless-os of openai
                expose_headers=("retry-after",),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""
        headers = Headers(scope=scope)
        local, _ = scope.get("server") or ("", 0)
        if _is_loopback(local) and not self._is_own_name(headers.get("host", "")):
            await _WRONG_HOST.response()(scope, receive, send)
        elif self._is_from_another_origin(scope["method"], headers):
            await _WRONG_ORIGIN.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_own_name(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower().removesuffix(".")
        return (
            not host
            or "*" in self._hosts
            or name in self._hosts
            or name.endswith(".localhost")  # browsers resolve it to loopback themselves
            or _is_address(re.sub(r"^\[(.*)\]$", r"\1", name))
        )

    def _is_from_another_origin(self, method: str, headers: Headers) -> bool:
        origin = headers.get("origin", "")
        if origin and ("*" in self._origins or origin in self._origins):
            return False
        site = headers.get("sec-fetch-site", "")
        if site:
            is_link = method in {"GET", "HEAD"} and headers.get("sec-fetch-dest") == "document"
            return site not in {"same-origin", "none"} and not is_link
        # Not a browser, or one that omits Sec-Fetch-Site over plain HTTP to such an address.
        authority = origin.partition("://")[2]  # "" if the origin is "null"
        return bool(origin) and (not authority or authority != headers.get("host"))


_WRONG_HOST = ApiError(
    "the Host header does not name this machine; use localhost or an IP address, or add the name "
    "to the setting allowed_hosts",
    status=421,
    code="wrong_host",
)
_WRONG_ORIGIN = ApiError(
    "this request comes from a web page of another origin; to allow it, add the origin to "
    "engine.cors_origins",
    status=403,
    code="wrong_origin",
)


def _is_loopback(text: str) -> bool:
    address = ip_address(text) if _is_address(text) else None
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
