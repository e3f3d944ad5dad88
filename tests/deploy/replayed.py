"""What a server once told Prometheus, told again as if its load had gone on ever since."""

from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from kvtier.observe.metrics import Metric

VLLM_PAGE = Path(__file__).with_name("vllm_metrics.txt")
"""Of a vLLM with kvtier's connector; ``record_vllm`` has written it."""


class Replayed:
    """Serves a page on loopback; with each look counters have grown by what is in it."""

    def __init__(self, page: Path) -> None:
        text, looks = page.read_text(), count(1)

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = "\n".join(told(text, next(looks))).encode() + b"\n"
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *said: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._thread = Thread(target=self._server.serve_forever)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def assert_tells(page: str, rows: Iterable[Metric]) -> None:
    """Fail unless rows of vLLM's are on a page, in the form in which they are asked for."""
    families = list(text_string_to_metric_families(page))
    labels = {sample.name: sample.labels.keys() for each in families for sample in each.samples}
    kinds = {each.name: each.type for each in families}
    for row in rows:
        kind = type(row).__name__.lower()
        assert kinds.get(row.name.removesuffix("_total")) == kind, f"{row.name} is not recorded"
        found = labels[f"{row.name}_count" if kind == "histogram" else row.name]
        assert found == {"engine", "model_name", *dict(row.labels)}, row.name


def told(page: str, times: int) -> Iterator[str]:
    """Yield a page's lines with all that only grows so many times as large."""
    grows = False
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            grows = line.split()[3] in {"counter", "histogram"}
        if grows and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            yield f"{series} {float(value) * times}"
        else:
            yield line
