"""Certificates for tests of servers and clients with TLS."""

import subprocess
from pathlib import Path


def make_certificates(folder: Path) -> None:
    """Write an authority (`ca.pem`) and certificates of a server and of a client that it signed.

    The server's files are `server-cert.pem` and `server-key.pem`, the client's `cert.pem` and `key.pem`.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=authority")
    for name, prefix in (("server", "server-"), ("client", "")):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *new, "-keyout", f"{prefix}key.pem", "-out", "request", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", "request", *sign, "-out", f"{prefix}cert.pem")
