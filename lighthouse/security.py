"""Decide who may speak with the lighthouse: TLS, bearer tokens, plain text only where it is safe.

A token file has one line per token: `JOB TOKEN` lets groups of that job in, `@operator TOKEN`
allows drain and evict for all jobs, `*` as a job stands for all jobs. A changed file is read again.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftcore.base.errors import BadSetting

OPERATOR = "@operator"
TOKEN_CHARS_MIN = 16


class BadTokenFile(BadSetting):
    """The token file cannot be used."""

    remedy = (
        "Write one `JOB TOKEN` a line, tokens of 16 characters or more (`openssl rand -hex 16`); "
        "`@operator TOKEN` lets the holder drain and evict, `* TOKEN` is good for every job."
    )


class PlainTextRefused(BadSetting):
    """The lighthouse would listen to the network without encryption."""

    remedy = (
        "Give --tls-cert and --tls-key, or listen on 127.0.0.1, or say --insecure if the network "
        "itself is private and trusted."
    )


def parse_tokens(text: str) -> Mapping[str, tuple[str, ...]]:
    """Tokens by job. Several lines for one job are all good, so that tokens can overlap."""
    tokens: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < TOKEN_CHARS_MIN:
            raise BadTokenFile(f"line {number} of the token file is not `JOB TOKEN`", line=number)
        tokens[words[0]] = (*tokens.get(words[0], ()), words[1])
    return tokens


@dataclass(slots=True, kw_only=True)
class TokenFile:
    """The tokens in a file. A file that became unreadable or wrong leaves the last good ones."""

    path: Path
    problem: str = ""
    _tokens: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _version: tuple[int, int, int] | None = None

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Raises BadTokenFile when the file cannot be used now."""
        file = cls(path=path)
        file.refresh()
        if file.problem:
            raise BadTokenFile(f"{path}: {file.problem}")
        return file

    def refresh(self) -> None:
        try:
            status = os.stat(self.path)
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version == self._version:
                return
            self._tokens = parse_tokens(self.path.read_text())
            self._version, self.problem = version, ""
        except (OSError, ValueError, BadTokenFile) as error:
            self.problem = str(error)

    def allows(self, job: str, token: str) -> bool:
        """Whether `token` lets a replica group of `job` in."""
        self.refresh()
        known = (*self._tokens.get(job, ()), *self._tokens.get("*", ()))
        return job != OPERATOR and _is_any_of(token, known)

    def is_operator(self, token: str) -> bool:
        self.refresh()
        return _is_any_of(token, self._tokens.get(OPERATOR, ()))


def _is_any_of(token: str, known: tuple[str, ...]) -> bool:
    """Takes the same time for every wrong token."""
    matches = [hmac.compare_digest(token.encode(), k.encode()) for k in known]
    return any(matches)


def bearer(header: str) -> str:
    """The token in `Authorization: Bearer TOKEN`, or nothing."""
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def require_safe_bind(host: str, *, has_tls: bool, insecure: bool) -> None:
    """Plain text only on loopback, unless somebody said `--insecure`."""
    if not (has_tls or insecure or is_loopback(host)):
        raise PlainTextRefused(f"plain text on {host or 'all addresses'} can be read by others")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(*, cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """A server context, TLS 1.2 or later. With `client_ca` only its certificates get in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1", "h2"])
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        what = f"the certificate files cannot be used: {error}"
        remedy = "Give PEM files: --tls-cert (chain), --tls-key (its key), --tls-client-ca."
        raise BadSetting(what, remedy=remedy, cert=str(cert)) from error
    return context
