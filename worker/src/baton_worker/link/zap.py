"""Who may connect over CURVE: the ZAP handler of one ZeroMQ context.

Owns the list of allowed keys and the thread that answers libzmq's questions about them. An unknown
key is answered 300 (try again later), never 400: after a 400 the peer's socket is dead for good, so
a key that is allowed a minute later would need a restart of the pod. A known key becomes the
connection's User-Id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from baton_worker.config import ConfigError
from baton_worker.identity import Role
from baton_worker.link.curve import is_key
from baton_worker.link.sockets import Socket
from baton_worker.link.wakeup import Wakeup
from baton_worker.logs import Seldom

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
_FIELDS = 7
_SETTLED_SECONDS = 2.0
"""The coarsest times that file systems keep; most have those of a kernel's tick, 10 ms at most.
What is written in place within one changes no time of the file.
"""

_ROLE = "role="
_ROLES = {role.label: role for role in Role}


class Allowed(NamedTuple):
    """Whose a key is: the only worker_id ("": any) and the only role (None: any)."""

    worker_id: str = ""
    role: Role | None = None


ANYBODY = Allowed()


class AllowedKeys:
    """A file of Z85 public keys, one a line, each optionally followed by the only worker_id that
    may use it, and by `role=` and the only role. Blank lines and lines that start with `#` are
    skipped. Changes are picked up by `refresh`, which several threads may call.
    """

    def __init__(self, field: str, path: str) -> None:
        """Read the file.

        Raises:
            ConfigError: naming `field`, when it cannot be read or a line is not a key.
        """
        if not path:
            raise ConfigError(
                f"{field} is empty, and link.curve.enabled is true: name a file with a line "
                "`KEY [worker_id] [role=prefill|decode|mixed]` for each public key let in"
            )
        self._field = field
        self._path = Path(path)
        self._lock = threading.Lock()
        self._stamp = (0, 0, 0, 0, 0)
        self._stamped_at = 0.0
        self._is_settled = False
        self._seldom = Seldom()
        self._keys: dict[str, Allowed] = {}
        self.version = 0
        self._load()

    @property
    def where(self) -> str:
        """The setting and the file, for people."""
        return f"{self._field}: {self._path}"

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def name_of(self, key: str) -> str:
        """Return the worker_id that `key` is bound to, or "" when it is free."""
        return self._keys.get(key, ANYBODY).worker_id

    def role_of(self, key: str) -> Role | None:
        """Return the only role that `key` may have, or None when it may have any."""
        return self._keys.get(key, ANYBODY).role

    def refresh(self) -> int:
        """Read the file again if it changed; a bad or missing file keeps the old keys, loudly.

        Returns how often the file has been read, so that several readers can each see a change.
        """
        # One at a time: who read the file before it changed must not have the last word.
        with self._lock:
            try:
                if not self._is_settled or self._current_stamp() != self._stamp:
                    self._load()
            except (ConfigError, OSError) as error:
                if self._seldom.is_due("not reloaded"):
                    log.warning("allowed keys not reloaded", extra={"error": str(error)})
            return self.version

    def _current_stamp(self) -> tuple[int, int, int, int, int]:
        """Return what changes with the file. Copies may keep the time of writing (cp -p), and a
        number is given to the next file; the time of change nobody sets.
        """
        status = self._path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        return *times, status.st_dev, status.st_ino, status.st_size

    def _load(self) -> None:
        try:
            stamp = self._current_stamp()
            now = time.monotonic()
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._field}: cannot read {self._path}: {error}") from error
        keys: dict[str, Allowed] = {}
        for number, line in enumerate(lines, 1):
            # '#' is a Z85 digit: only a whole line can be a comment.
            words = line.split()
            if not words or (words[0].startswith("#") and not is_key(words[0].encode())):
                continue
            if not is_key(words[0].encode()):
                raise ConfigError(f"{self._field}: {self._path}:{number} is not a Z85 public key")
            keys[words[0]] = self._allowed(number, words[1:])
        if stamp != self._stamp:
            self._stamped_at = now
        # Another key of the same length, written over this one in the tick that gave the file its
        # time, leaves the stamp as it is: it stands for what was read once that tick is over.
        # Its age is this process's to tell; a file server's clock may be another.
        self._is_settled = now - self._stamped_at >= _SETTLED_SECONDS
        self._keys, self._stamp = keys, stamp
        self.version += 1

    def _allowed(self, number: int, words: list[str]) -> Allowed:
        roles = [word.removeprefix(_ROLE) for word in words if word.startswith(_ROLE)]
        names = [word for word in words if not word.startswith(_ROLE)]
        if len(roles) > 1 or len(names) > 1 or any(role not in _ROLES for role in roles):
            raise ConfigError(
                f"{self._field}: {self._path}:{number} is no key with a worker_id and role= one of "
                f"{', '.join(_ROLES)}, both optional"
            )
        return Allowed("".join(names), _ROLES[roles[0]] if roles else None)


class ZapHandler:
    """Answers for all CURVE servers of one context, on its own thread."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        allowed: AllowedKeys,
        on_refused: Callable[[str], None],
        is_welcome: Callable[[str], bool] | None = None,
    ) -> None:
        """Bind; nothing is answered before `start`.

        Args:
            context: the servers' context.
            allowed: read on every question.
            on_refused: told the reason of each refusal, on the handler's thread.
            is_welcome: whether an allowed key may use these servers; None: every one may.
        """
        self._allowed = allowed
        self._on_refused = on_refused
        self._is_welcome = is_welcome or (lambda key: True)
        self._seldom = Seldom()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._context = context
        self._thread = threading.Thread(target=self._run, name="baton-zap", daemon=True)
        self._ready = threading.Event()

    def start(self) -> None:
        """Answer from now on. Call it before a server socket binds."""
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Stop answering, and give the socket back, so that the context can end."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        socket = self._context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(ENDPOINT)
        self._ready.set()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while not self._is_closing:
            if dict(poller.poll()).get(socket):
                socket.send_multipart(self._answer(socket.recv_multipart()))
        socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request_id = frames[0], frames[1]
        if len(frames) != _FIELDS or frames[5] != b"CURVE":
            self._on_refused("mechanism")
            return [version, request_id, b"400", b"CURVE only", b"", b""]
        key = z85.encode(frames[6])
        self._allowed.refresh()
        reason = "unknown_key"
        if key.decode() in self._allowed:
            if self._is_welcome(key.decode()):
                return [version, request_id, b"200", b"OK", key, b""]
            reason = "role_not_allowed"
        if self._seldom.is_due(reason):
            facts = {"reason": reason, "public_key": key.decode(), "list": self._allowed.where}
            log.warning("a key was refused (the counter knows how many more)", extra=facts)
        self._on_refused(reason)
        return [version, request_id, b"300", reason.encode(), b"", b""]
