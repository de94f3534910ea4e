"""The certificates of a broker: an authority of its own, and one for each node, signed by it.

Guarantees: what exists and is good for another RENEW_DAYS is kept, so clients that hold `ca.pem` never need a new one because a
node got a new certificate; private keys are readable by their owner only. tests/controller/test_broker_setup.py.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
RENEW_DAYS = 30
BACKDATED = timedelta(minutes=10)
"""Other machines' clocks may be a little behind."""


def write_private(path: Path, data: bytes) -> None:
    """For the owner's eyes from the first byte on; appears whole."""
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def ensure_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority in `folder`, made if there is none."""
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() and key.exists():
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        return x509.load_pem_x509_certificate(certificate.read_bytes()), private
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = ec.generate_private_key(ec.SECP256R1())
    name = _name("Slipstream broker authority")
    made = (
        _builder(name, name, private, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(private, hashes.SHA256())
    )
    write_private(key, _pem(private))
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return made, private


def ensure_node(
    folder: Path, names: Sequence[str], days: int, authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
) -> bool:
    """`server.pem` and `server.key` of a node that is reached under `names`. True if they are new."""
    certificate, key = folder / "server.pem", folder / "server.key"
    if certificate.exists() and key.exists() and _is_good(certificate, names, authority[0]):
        return False
    private = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # a node is a client of its peers
    made = (
        _builder(_name(names[0]), authority[0].subject, private, days)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[1].public_key()),
            critical=False,
        )
        .sign(authority[1], hashes.SHA256())
    )
    write_private(key, _pem(private))
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return True


def _is_good(file: Path, names: Sequence[str], authority: x509.Certificate) -> bool:
    found = x509.load_pem_x509_certificate(file.read_bytes())
    told = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    lasts = found.not_valid_after_utc - datetime.now(UTC) > timedelta(days=RENEW_DAYS)
    return lasts and list(told) == [_alternative(name) for name in names] and found.issuer == authority.subject


def _builder(
    subject: x509.Name, issuer: x509.Name, private: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        key_encipherment=False,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
