"""A passive party elsewhere, as its lead sees it: calls over gRPC, both sides with certificates."""

import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import AtollError, Refused
from . import wire
from .protocol import Phase
from .service import METHOD, note, read_identity, read_note

_GREET = 600.0  # seconds a party may take to build its world
_ANSWER = 600.0  # seconds a party may take to answer; the first time it compiles


class Gone(Exception):
    """A party cannot be reached, has forgotten the session, or said what cannot count."""

    def __init__(self, name: str, why: str, process: str = "") -> None:
        super().__init__(f"{name} {why}")
        self.name = name
        self.process = process  # not to be talked to again


class Pending:
    """Answers that are under way."""

    def __init__(self, peer: "RemotePeer", start: wire.Start, call: Any) -> None:
        self._peer = peer
        self._start = start
        self._call = call

    def answers(self) -> list[Any]:
        """They, checked."""
        return self._peer.received(self._start, self._call.result)


class RemotePeer:
    """A passive party elsewhere."""

    def __init__(self, place: int, address: str, certs: Path | None) -> None:
        """The party at `place`, which must show that name; `certs` is the lead's folder, None for none at all."""
        import grpc

        self.name = f"party-{place}"
        self.place = place
        self.address = address
        self.process = ""
        self._certs = certs
        self._session = self._turn = 0
        self._forms: wire.Forms
        options = [
            ("grpc.max_receive_message_length", wire.LONGEST),
            ("grpc.ssl_target_name_override", self.name),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        if certs is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            ca, key, certificate = read_identity(certs, "lead")
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options)
        self._calls = {call: self._channel.unary_unary(METHOD + call) for call in ("hello", "start", "turn")}

    def greet(self, forms: wire.Forms, **greeting: Any) -> list[int]:
        """Tell the party of the run; the steps it has kept."""
        self._forms = forms
        answer = self._note("hello", {"process": str, "steps": list}, **greeting, place=self.place)
        self.process = answer["process"]
        return [step for step in answer["steps"] if type(step) is int]

    def start(self, run: str, step: int) -> None:
        """Let the party go on from `step`; -1 begins anew."""
        self._turn, self._session = 0, self._note("start", {"session": int}, run=run, step=step)["session"]

    def send(self, phase: Phase, *calls: tuple[str, Any]) -> Pending:
        """Ask for one thing, or several in one frame, without waiting for the answers."""
        start, data = self._frame(phase, calls)
        return Pending(self, start, self._calls["turn"].future(data, timeout=_ANSWER))

    def ask(self, phase: Phase, *calls: tuple[str, Any]) -> list[Any]:
        """The answers to one thing, or several in one frame; a little faster than to send and then to wait."""
        start, data = self._frame(phase, calls)
        return self.received(start, lambda: self._calls["turn"](data, timeout=_ANSWER))

    def _frame(self, phase: Phase, calls: tuple[tuple[str, Any], ...]) -> tuple[wire.Start, bytes]:
        self._turn += 1
        start = wire.Start(self._session, self._turn, phase, tuple(name for name, _ in calls))
        return start, wire.frame(start, [message for _, message in calls])

    def received(self, start: wire.Start, answer: Callable[[], bytes]) -> list[Any]:
        """The answers to a frame, checked."""
        import grpc

        try:
            data = answer()
        except grpc.RpcError as error:
            raise self._failed(error) from None
        try:
            said, content = wire.opened(data)
            if said != start:
                raise Refused(f"it answers turn {said.turn} of another call, expected {start.turn}")
            return wire.read(content, start.calls, [self._forms.answer(name, start.phase) for name in start.calls])
        except Refused as error:
            raise Gone(self.name, f"is refused: {error}", self.process) from error

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _note(self, call: str, kinds: dict[str, type[Any]], **content: Any) -> dict[str, Any]:
        import grpc

        try:
            return read_note(self._calls[call](note(**content), timeout=_GREET), kinds)
        except grpc.RpcError as error:
            raise self._failed(error) from None
        except Refused as error:
            raise Gone(self.name, f"is refused: {error}", self.process) from error

    def _failed(self, error: Any) -> Exception:
        import grpc

        code, details = error.code(), error.details()
        where = f"{self.name} at {self.address}"
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return AtollError(f"{where} refuses: {details}")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return AtollError(f"{where} refuses: {details}; give --certs the folder of the lead")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return AtollError(f"{where} is no party of Atoll; start one there: atoll party serve")
        if code is grpc.StatusCode.UNAVAILABLE and self._certs is not None:
            why = refusal(self.address, self.name, self._certs)
            if why:
                return AtollError(f"{where} {why}")
        return Gone(self.name, f"at {self.address} does not answer ({code.name.lower().replace('_', ' ')})")


def ask_all(phase: Phase, questions: Sequence[tuple[RemotePeer, tuple[tuple[str, Any], ...]]]) -> list[list[Any]]:
    """Ask parties at the same time; the answers of each."""
    *others, (last, calls) = questions
    pending = [peer.send(phase, *calls) for peer, calls in others]
    answers = last.ask(phase, *calls)
    return [*(one.answers() for one in pending), answers]


def refusal(address: str, name: str, certs: Path) -> str:
    """Why a TLS connection that both sides check fails; empty if it does not, or if nobody is there."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=certs / "ca.crt")
    context.load_cert_chain(certs / "lead.crt", certs / "lead.key")
    context.set_alpn_protocols(["h2"])
    for _ in range(2):  # a party that ends just now closes the connection too, but only once
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), 5) as plain,
                context.wrap_socket(plain, server_hostname=name) as secure,
            ):
                if secure.recv(1):  # the other side has seen our certificate, and talks
                    return ""
        except ssl.SSLCertVerificationError:
            return f"is refused: its certificate is not that of {name} by the authority of {certs}/ca.crt"
        except ssl.SSLError:
            pass
        except OSError:
            return ""
    return f"refuses: it does not take the certificate in {certs}; it must be the lead's, by the same authority"
