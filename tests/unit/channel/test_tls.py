"""The hub's certificate, and when it is missed."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pipelinerl_core.channel.connection import CERTIFIED_NAME
from pipelinerl_core.channel.tls import make_credentials
from pipelinerl_core.host import is_loopback


def test_a_certificate_is_its_keys_for_one_name_and_signs_no_other():
    made = make_credentials()
    certificate = x509.load_pem_x509_certificate(made.certificate.encode())
    key = load_pem_private_key(made.key.encode(), password=None)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [CERTIFIED_NAME]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now - timedelta(hours=23)  # a client's clock may be behind
    assert certificate.not_valid_after_utc > now + timedelta(days=3000)


def test_every_start_has_another_key():
    assert make_credentials().key != make_credentials().key


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("hub.example", False),
    ],
)
def test_only_loopback_is_loopback(host, expected):
    assert is_loopback(host) is expected
