"""The hub's TLS certificate: created at each start, self-signed, published to clients in hub.json.

No certificate authority is needed: clients accept only this certificate. Write access to hub.json already allows
redirecting clients, so hub.json is trusted. The private key stays in the memory of the hub.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pipelinerl_core.channel.connection import CERTIFIED_NAME

_SKEW = timedelta(days=1)  # tolerated difference between the clocks of hosts
_LIFE = timedelta(days=3650)  # longer than any hub process


class Credentials(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: str
    key: str


def make_credentials() -> Credentials:
    """A new key (P-256) and a certificate for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, CERTIFIED_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFIED_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Credentials(
        certificate.public_bytes(Encoding.PEM).decode(),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    )
