"""From tokens to text while they come: half a character and a possible stop string are held back."""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"  # what a tokenizer decodes half a character to


class Detokenizer:
    """The text of one request's output, token by token.

    `text` is what is settled, stop string and all after it cut off; `push` returns what became settled.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._prefix = 0  # decoding starts here: a tokenizer joins words only when it sees the neighbour
        self._read = 0  # where the next window will start
        self._done = 0  # characters of the window ids[prefix:] that are in `_decoded`
        self._decoded = ""
        self._given = 0  # characters already returned
        self.stopped = False

    @property
    def text(self) -> str:
        return self._decoded

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is now certain. Sets `stopped` when a stop string is complete."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._prefix :])
        settled = len(window.rstrip(REPLACEMENT))  # half a character at the end may still become a whole one
        if settled > self._done:
            self._append(window[self._done : settled])
            self._done = settled
        if settled == len(window):
            self._prefix, self._read = self._read, len(self._ids)
            self._done = len(self._decode(self._ids[self._prefix : self._read]))
        return self._give(len(self._decoded) if self.stopped else len(self._decoded) - self._pending_stop())

    def flush(self) -> str:
        """The output is over: returns what was held back, an incomplete character as the tokenizer shows it."""
        if not self.stopped:
            window = self._decode(self._ids[self._prefix :])
            self._append(window[self._done :])
            self._done = len(window)
        return self._give(len(self._decoded))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _append(self, piece: str) -> None:
        """Adds decoded text and cuts it at the first stop string, which may span several pieces."""
        longest = max((len(s) for s in self._stop), default=0)
        start = max(0, len(self._decoded) - longest + 1)
        self._decoded += piece
        found = [(at + len(s), at) for s in self._stop if (at := self._decoded.find(s, start)) >= 0]
        if found:  # the one complete first, as if the text had come character by character
            self._decoded, self.stopped = self._decoded[: min(found)[1]], True

    def _pending_stop(self) -> int:
        """Length of the longest tail of the text that could still become a stop string."""
        for length in range(max((len(s) for s in self._stop), default=1) - 1, 0, -1):
            if length <= len(self._decoded) and any(
                s.startswith(self._decoded[-length:]) for s in self._stop if len(s) > length
            ):
                return length
        return 0

    def _give(self, end: int) -> str:
        piece, self._given = self._decoded[self._given : end], max(self._given, end)
        return piece
