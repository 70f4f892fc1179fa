"""TLS between the processes of a run: by the certificates of files, or of an authority that the run has."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve


def serving(pem: str) -> ssl.SSLContext:
    """Return the context of a server, from its certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    memory = os.memfd_create("certificate")  # a key that OpenSSL reads from files alone goes to no disk
    try:
        os.write(memory, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def trusting(pem: str) -> ssl.SSLContext:
    """Return the context of a client that trusts this certificate, and those that it has signed, of any host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whose certificates these are is known: addresses say no more
    context.load_verify_locations(cadata=pem)
    return context


def certificate(address: str | None = None, issuer: str | None = None) -> str:
    """Return a new certificate and its key in PEM, signed by `issuer`, another such pair, or else by itself.

    Raises InvalidRequest without the package cryptography.
    """
    make = resolve("agentloop_servers.net.certificates:make_certificate", param="cluster.tls")
    return cast(Callable[[str | None, str | None], str], make)(address, issuer)


def without_key(pem: str) -> str:
    """Return the certificate of one with its key."""
    cert, end, _ = pem.partition("-----END CERTIFICATE-----\n")
    return cert + end


@dataclass(frozen=True, slots=True)
class FileCertificates:
    """PEM files, at the same paths on every node; each node's certificate names its address."""

    cert: str
    key: str
    ca: str

    @property
    def of_workers(self) -> FileCertificates:
        return self

    def server(self, address: str) -> ssl.SSLContext:
        """Return the context of this node's servers. Raises InvalidRequest for files that none could use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # an SSLError too
            raise InvalidRequest(f"{self.cert} with {self.key}: {error}", param="cluster.tls.cert") from error
        return context

    def client(self) -> ssl.SSLContext:
        """Return the context of callers. Raises InvalidRequest for a file that is none of authorities."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise InvalidRequest(f"{self.ca}: {error}", param="cluster.tls.ca") from error
        return context


@dataclass(frozen=True, slots=True)
class RunAuthority:
    """A run's own authority, by which each process makes the certificate of its address. Workers lack its key."""

    cert: str
    key: str = field(repr=False)

    @classmethod
    def of(cls, pem: str) -> RunAuthority:
        """Return that of a certificate and its key, as `certificate` makes them."""
        return cls(without_key(pem), pem)

    @property
    def of_workers(self) -> RunAuthority:
        return replace(self, key="")

    def server(self, address: str) -> ssl.SSLContext:
        """Return the context of a process's servers at this address."""
        return serving(certificate(address, self.key))

    def client(self) -> ssl.SSLContext:
        """Return the context of callers."""
        context = trusting(self.cert)
        context.check_hostname = True
        return context


Certificates = FileCertificates | RunAuthority
