"""An authority that signs whatever a test needs: good certificates, expired ones, and those of somebody else."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.settings import RpcSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DAY = datetime.timedelta(days=1)
TRUST_DOMAIN = RpcSettings().trust_domain


@dataclass(frozen=True, slots=True)
class Identity:
    """Files of one peer: its certificate and key, and the authority that it believes."""

    certificate: Path
    key: Path
    authority: Path

    def settings(self, **more: object) -> RpcSettings:
        files = {"certificate": self.certificate, "key": self.key, "authority": self.authority}
        return RpcSettings.model_validate(files | more)


class Authority:
    """Signs certificates: for 127.0.0.1 and localhost, where no names are given."""

    def __init__(self, directory: Path, name: str = "ours") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = directory / f"{name}-authority.pem"
        builder = self._builder(self._name, self._key, DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        *,
        expired: bool = False,
        believes: Path | None = None,
        hosts: Sequence[str] = (),
        roles: Sequence[str] = (),
        uris: Sequence[str] = (),
    ) -> Identity:
        """Write a certificate and its key, for `hosts` if there are any; an expired one ended an hour ago.

        `roles` are those of services in the default trust domain.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        lifetime = -datetime.timedelta(hours=1) if expired else DAY
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        uris = [*(f"spiffe://{TRUST_DOMAIN}/pando/{role}" for role in roles), *uris]
        names = [*([x509.DNSName(host) for host in hosts] or here), *map(x509.UniformResourceIdentifier, uris)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            self._builder(subject, key, lifetime)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        identity = Identity(self._directory / f"{name}.pem", self._directory / f"{name}.key", believes or self.path)
        identity.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        identity.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return identity

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + lifetime)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
