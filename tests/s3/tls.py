"""An S3 server that speaks TLS, and certificates for it by an authority of our own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .servers import RcloneServer


class TlsRclone(RcloneServer):
    """Speaks TLS alone; to a request without it, it answers 400, so the start is noticed all the same."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__()
        self._files = (certificate, key)

    def _command(self) -> list[str]:
        certificate, key = self._files
        return [*super()._command(), f"--cert={certificate}", f"--key={key}"]


def make_certificate(directory: Path, name: str, *, expired: bool = False) -> tuple[Path, Path, Path]:
    """Make an authority and a certificate by it; return the certificate's file, its key's, the authority's."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    until = now - day if expired else now + day
    ours = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "our authority")])
    theirs = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    is_address = name.replace(".", "").isdigit()
    alternative = x509.IPAddress(ipaddress.ip_address(name)) if is_address else x509.DNSName(name)

    def sign(subject: x509.Name, public: Any, end: datetime.datetime, *extensions: tuple[Any, bool]) -> bytes:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(ours).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - 2 * day)
        builder = builder.not_valid_after(end)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    files = (directory / f"{name}.pem", directory / f"{name}.key", directory / f"{name}-authority.pem")
    key_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    files[0].write_bytes(
        sign(
            theirs,
            key.public_key(),
            until,
            (x509.SubjectAlternativeName([alternative]), False),
            (key_identifier, False),
        )
    )
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    files[2].write_bytes(
        sign(
            ours,
            signer.public_key(),
            now + day,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), False),
        )
    )
    return files
