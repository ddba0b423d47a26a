"""A server that lists objects as S3 does and answers for each key as it is told."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.data.pictures import jpeg

BODY = jpeg(32, 32)
STALL_S = 120
TOGETHER_S = 10


class Server(ThreadingHTTPServer):
    """Answers GET of a key by `answers`: a status, "stall", "short", or how often 503 is first.

    "together" waits for others of the kind, so that four at once are answered, and fewer by 503.
    """

    daemon_threads = True

    def __init__(self, answers: dict[str, object]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.requests: Counter[str] = Counter()
        self.listing_status = 200
        self.ended = threading.Event()
        self.four_at_once = threading.Barrier(4, timeout=TOGETHER_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        self.server.requests[key] += 1
        if not key:
            self._answer(self.server.listing_status, listing(self.server.answers))
            return
        answer = self.server.answers[key]
        if isinstance(answer, int) and answer >= 400:
            self._answer(answer, error(answer))
        elif answer == "stall":
            self.server.ended.wait(STALL_S)
        elif answer == "together":
            try:
                self.server.four_at_once.wait()
                self._answer(200, BODY)
            except threading.BrokenBarrierError:
                self._answer(503, error(503))
        elif answer == "short":
            self._answer(200, BODY[:100], length=len(BODY))
        elif isinstance(answer, int) and self.server.requests[key] <= answer:
            self._answer(503, error(503))
        else:
            self._answer(200, BODY)

    def _answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)
        self.close_connection = True


def error(status: int) -> bytes:
    code = {403: "AccessDenied", 404: "NoSuchKey"}.get(status, "InternalError")
    return f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()


def listing(keys: dict[str, object]) -> bytes:
    time_ = "2026-01-01T00:00:00.000Z"
    found = "".join(
        f"<Contents><Key>{key}</Key><Size>{len(BODY)}</Size><ETag>1</ETag>"
        f"<LastModified>{time_}</LastModified></Contents>"
        for key in sorted(keys)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


@contextlib.contextmanager
def serving(answers: dict[str, object]) -> Iterator[Server]:
    server = Server(answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
