"""A proxy before a server that loses an answer on the way: what was sent has been done."""

from __future__ import annotations

import socket
import threading


class CuttingProxy:
    """Pass everything on, until told to cut the connection instead of passing an answer on."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._word = b""
        self.cuts = 0
        """How many answers were lost."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, word: bytes) -> None:
        """Lose the answer to the next request that holds this, and its connection."""
        self._word = word

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._to)
        except OSError:  # the server is gone, and so is who asked
            near.close()
            return
        with near, far:
            doomed = threading.Event()
            back = threading.Thread(target=self._answers, args=(far, near, doomed), daemon=True)
            back.start()
            try:
                while data := near.recv(1 << 20):
                    if self._word and self._word in data:
                        self._word = b""
                        self.cuts += 1
                        doomed.set()
                    far.sendall(data)
            except OSError:
                pass
            finally:
                _shut(far)
            back.join()

    def _answers(self, far: socket.socket, near: socket.socket, doomed: threading.Event) -> None:
        try:
            # The server has done it when it answers.
            while data := far.recv(1 << 20):
                if doomed.is_set():
                    break
                near.sendall(data)
        except OSError:
            pass
        _shut(near)


def _shut(line: socket.socket) -> None:
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
