"""The keys of sessions: each opens one session, and is checked without a table.

A key is `sk-agentloop-{session id}.{HMAC-SHA256 of the id under the run's secret}`. It ends with its session:
ids are never used twice.
"""

from __future__ import annotations

import hmac

_PREFIX = "sk-agentloop-"
_PURPOSE = b"agentloop session key\0"  # the run's secret has other uses, whose digests are no keys


class SessionKeys:
    """Makes and reads the keys of one run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def key_of(self, session_id: str) -> str:
        """The key that opens this session."""
        return f"{_PREFIX}{session_id}.{self._digest(session_id)}"

    def session_of(self, key: str) -> str | None:
        """The session that `key` opens; None for what is no key of this run."""
        if not key.startswith(_PREFIX):
            return None
        session_id, _, digest = key[len(_PREFIX) :].rpartition(".")
        # In bytes: `compare_digest` takes no text beyond ASCII, and clients send what they like.
        expected = self._digest(session_id).encode()
        return session_id if hmac.compare_digest(digest.encode(errors="replace"), expected) else None

    def _digest(self, session_id: str) -> str:
        return hmac.digest(self._secret, _PURPOSE + session_id.encode(errors="replace"), "sha256").hex()
