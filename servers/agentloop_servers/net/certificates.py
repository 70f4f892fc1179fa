"""Creation of certificates with the package cryptography. `net/tls.py` imports it only if `cluster.tls` is set."""

from __future__ import annotations

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_VALID = datetime.timedelta(days=3650)
_CLOCKS = datetime.timedelta(days=1)  # tolerated clock difference between hosts


def make_certificate(address: str | None, issuer: str | None) -> str:
    """See `tls.certificate`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"agentloop {address or 'run'}")])
    signer, signer_name = key, name
    if issuer is not None:
        loaded = serialization.load_pem_private_key(issuer.encode(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer, signer_name = loaded, x509.load_pem_x509_certificate(issuer.encode()).subject
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(signer_name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if address is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    made = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (made + private).decode()
