"""A server that speaks enough of the OpenAI protocol, and misbehaves on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


@dataclass
class Reply:
    """What is sent back. body: an object is sent as JSON, text as it is.

    delay: seconds before it is sent. fault: drop the connection without a word, or cut the body.
    """

    body: Any
    status: int = 200
    delay: float = 0.0
    fault: str | None = None  # drop | cut
    headers: dict[str, str] = field(default_factory=dict)


def completion(
    content: str | None,
    *,
    finish: str | None = "stop",
    prompt_ids: Any = None,
    token_ids: Any = None,
    **extra: Any,
) -> dict[str, Any]:
    """A response as vLLM gives it. extra: further keys of the message."""
    message = {"role": "assistant", "content": content, **extra}
    choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": token_ids}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": MODEL}
    return {**body, "choices": [choice], "prompt_token_ids": prompt_ids}


def failure(status: int, message: str, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply({"error": {"message": message}}, status=status, headers=named)


def echo(request: dict[str, Any]) -> Reply:
    return Reply(completion(f"answer to {asked(request)}"))


def asked(request: dict[str, Any]) -> str:
    return request["messages"][-1]["content"]


class FakeServer:
    """Answers in threads, by `script`, which sees the request's body. Records what arrives."""

    def __init__(
        self,
        script: Callable[[dict[str, Any]], Reply] = echo,
        *,
        models: Any = (MODEL,),
        models_status: int = 200,
    ) -> None:
        self.script = script
        self.listing = Reply({"data": [{"id": m} for m in models]}, status=models_status)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.fake = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def asked(self) -> list[str]:
        return [asked(request) for request in self.requests]

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that there are."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def answer(self, request: dict[str, Any], headers: dict[str, str]) -> Reply:
        with self.lock:
            self.requests.append(request)
            self.headers.append(headers)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.script(request)
            self.stopped.wait(reply.delay)
        finally:
            with self.lock:
                self.in_flight -= 1
        return reply


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._send(self.server.fake.listing if self.path == "/v1/models" else Reply("", 404))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.server.fake
        if self.path != "/v1/chat/completions":
            self._send(failure(404, f"no {self.path}"))
        else:
            self._send(fake.answer(request, {k.lower(): v for k, v in self.headers.items()}))

    def _send(self, reply: Reply) -> None:
        if reply.fault == "drop" or self.server.fake.stopped.is_set():
            self.close_connection = True
            return
        text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        if reply.fault == "cut":
            text = text[: len(text) // 2]
            self.close_connection = True
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
