"""TLS between the processes of a run, with certificates from files or from the run's own certificate authority."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve


def serving(pem: str) -> ssl.SSLContext:
    """Return the TLS context of a server from its certificate and key in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    memory = os.memfd_create("certificate")  # OpenSSL loads keys from files only: do not write the key to a disk
    try:
        os.write(memory, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def trusting(pem: str) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts this certificate and certificates signed by it, for any
    host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself identifies the peer; its address adds nothing
    context.load_verify_locations(cadata=pem)
    return context


def certificate(address: str | None = None, issuer: str | None = None) -> str:
    """Return a new certificate and its key in PEM, signed by `issuer` (another such pair) or self-signed.

    Raises InvalidRequest if the package cryptography is not installed.
    """
    make = resolve("agentloop_servers.net.certificates:make_certificate", param="cluster.tls")
    return cast(Callable[[str | None, str | None], str], make)(address, issuer)


def without_key(pem: str) -> str:
    """Return only the certificate of a PEM text with certificate and key."""
    cert, end, _ = pem.partition("-----END CERTIFICATE-----\n")
    return cert + end


@dataclass(frozen=True, slots=True)
class FileCertificates:
    """PEM files at the same paths on every node. Each node's certificate must name the node's address."""

    cert: str
    key: str
    ca: str

    @property
    def of_workers(self) -> FileCertificates:
        return self

    def server(self, address: str) -> ssl.SSLContext:
        """Return the TLS context of this node's servers. Raises InvalidRequest if the files cannot be loaded."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes SSLError
            raise InvalidRequest(
                f"cannot load certificate {self.cert} with key {self.key}: {error}", param="cluster.tls.cert"
            ) from error
        return context

    def client(self) -> ssl.SSLContext:
        """Return the TLS context of clients. Raises InvalidRequest if the authority's file cannot be loaded."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise InvalidRequest(
                f"cannot load the certificate authority {self.ca}: {error}", param="cluster.tls.ca"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class RunAuthority:
    """A run's own certificate authority, with which each process creates a certificate for its address.

    Workers do not receive the authority's key, because they run user code.
    """

    cert: str
    key: str = field(repr=False)

    @classmethod
    def of(cls, pem: str) -> RunAuthority:
        """Make an authority from the result of `certificate`: a certificate and its key in PEM."""
        return cls(without_key(pem), pem)

    @property
    def of_workers(self) -> RunAuthority:
        return replace(self, key="")

    def server(self, address: str) -> ssl.SSLContext:
        """Return the TLS context of a process's servers at this address."""
        return serving(certificate(address, self.key))

    def client(self) -> ssl.SSLContext:
        """Return the TLS context of clients, which also checks the server's address."""
        context = trusting(self.cert)
        context.check_hostname = True
        return context


Certificates = FileCertificates | RunAuthority
