"""A certificate authority for tests, made by openssl."""

import subprocess


def run(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    def __init__(self, directory):
        self.directory = directory
        self.ca, self.ca_key = directory / "ca.pem", directory / "ca.key"
        run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
            "-keyout", str(self.ca_key), "-out", str(self.ca))  # fmt: skip

    def issue(self, name):
        """A certificate for localhost and its key."""
        cert, key, request = (self.directory / f"{name}.{e}" for e in ("pem", "key", "csr"))
        names = self.directory / "names.txt"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        run("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
            "-keyout", str(key), "-out", str(request))  # fmt: skip
        run("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self.ca_key),
            "-CAcreateserial", "-days", "2", "-extfile", str(names), "-out", str(cert))  # fmt: skip
        return cert, key
