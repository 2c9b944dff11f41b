"""S3 over TLS, with a certificate that only AWS_CA_BUNDLE vouches for."""

import datetime
import ipaddress
import os

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckpt.stores.errors import StoreDenied
from tests.stores.servers import rclone


def self_signed(path):
    """A certificate for 127.0.0.1 and its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ckpt tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + text)
    return path


@pytest.fixture
def server(tmp_path, monkeypatch):
    certificate = self_signed(tmp_path / "server.pem")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with rclone(tmp_path / "data", certificate=certificate) as server:
        yield server


def test_objects_go_and_come_in_parts_over_tls(server):
    data = os.urandom(13 << 20)
    with server.store() as store:
        store.put_large("big", data)
        memory = bytearray(len(data))
        store.get_into("big", memoryview(memory))
    assert memory == data


def test_a_certificate_that_nobody_vouches_for_is_refused(server, monkeypatch):
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with (
        server.store() as store,
        pytest.raises(StoreDenied, match="CERTIFICATE_VERIFY") as failure,
    ):
        store.put("a", b"1")
    assert "AWS_CA_BUNDLE" in failure.value.remedy
